"""What `python -m mm_autoparallel VERB …` runs: the command line."""

from mm_autoparallel.cli.main import start

if __name__ == "__main__":
    start()
