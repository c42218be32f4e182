"""python -m txl_audio.cli"""

from txl_audio.cli import main

main()
