"""Standard output of the Python tools. When a write to it fails, that is one line on stderr and exit code 1."""
import atexit
import codecs
import contextlib
import errno
import io
import os
import sys


def shown(error):
    """Paths need not be UTF-8: their bytes go out as they came. A character that the encoding lacks goes as \\x…"""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error("shown", shown)


class Stdout(io.TextIOWrapper):
    """No OSError leaves it, because whoever prints would take that for one of his own files."""
    failed = False

    def write(self, text):
        return self.attempt(super().write, text)

    def flush(self):
        self.attempt(super().flush)

    def attempt(self, method, *text):
        try:
            return method(*text)
        except OSError as error:
            self.failed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left goes nowhere
            if error.errno == errno.EPIPE:  # `| head` has seen enough
                sys.exit(1)
            stop(f"cannot write: {error.strerror}; make room or send it elsewhere")


def stop(why):
    print(f"{os.path.basename(sys.argv[0])}: stdout: {why}", file=sys.stderr, flush=True)
    sys.exit(1)


def at_exit():
    with contextlib.suppress(SystemExit):
        sys.stdout.flush()
    if sys.stdout.failed:  # now or in the flush behind a script's last line, which forgets what was raised
        os._exit(1)


def guard_stdout():
    """The first that a tool calls, unless a test has put something else in the place of stdout."""
    if sys.stdout is None:  # the next file that is opened would get its number
        stop("is closed; send it to a file or to /dev/null")
    if sys.stdout is sys.__stdout__ and not isinstance(sys.stdout, Stdout):
        how = {name: getattr(sys.stdout, name) for name in ("encoding", "line_buffering", "write_through")}
        sys.stdout = sys.__stdout__ = Stdout(sys.stdout.detach(), errors="shown", **how)
        atexit.register(at_exit)
