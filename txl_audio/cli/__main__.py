"""python -m txl_audio.cli"""

from txl_audio.cli import main

if __name__ == "__main__":
    main()
