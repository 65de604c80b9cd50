"""python -m hetperm, and the command hetperm."""

import signal

# Until the command runs and can answer, Ctrl-C ends the process at once: no traceback of half an import.
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hetperm.cli.main import main

if __name__ == "__main__":
    main()
