"""How these scripts end: a user's mistake is one line on stderr and status 2, a failed run one line and 1."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def run(main: Callable[[], None]) -> NoReturn:
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(error, 2 if error.filename else 1)  # a file that was named, or a full disk
    except (ValueError, ImportError) as error:
        fail(error, 2)
    except RuntimeError as error:
        fail(error, 1)
    sys.exit(0)


def fail(error: Exception, status: int) -> NoReturn:
    print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    sys.exit(status)
