"""Standard output of the Python tools. When a write to it fails, that is one line on stderr and exit code 1."""
import codecs
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


def stop(why):
    print(f"{os.path.basename(sys.argv[0])}: stdout: {why}", file=sys.stderr, flush=True)
    os._exit(1)  # the interpreter would write again what is left


class Stdout(io.TextIOWrapper):
    """No OSError leaves it, because whoever prints would take that for one of his own files."""
    def write(self, text):
        return self.attempt(super().write, text)

    def flush(self):
        self.attempt(super().flush)

    def attempt(self, method, *text):
        try:
            return method(*text)
        except BrokenPipeError:  # `| head` has seen enough
            os._exit(1)
        except OSError as error:
            stop(f"cannot write: {error.strerror}; make room or send it elsewhere")


def guard_stdout():
    """The first that a tool calls, unless a test has put something else in the place of stdout."""
    if sys.stdout is None:  # the next file that is opened would get its number
        stop("is closed; send it to a file or to /dev/null")
    if sys.stdout is sys.__stdout__ and not isinstance(sys.stdout, Stdout):
        how = {name: getattr(sys.stdout, name) for name in ("encoding", "line_buffering", "write_through")}
        sys.stdout = sys.__stdout__ = Stdout(sys.stdout.detach(), errors="shown", **how)
