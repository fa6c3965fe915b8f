"""`python -m glassformer` is `glass`; a Ctrl-C while it is still being imported ends it quietly."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main` can handle the exception

from glassformer.cli.main import main

if __name__ == "__main__":
    main()
