"""Listening while it is made: a streaming server, its page and a client."""
