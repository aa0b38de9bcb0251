"""`python -m tvr_lightning.cli`, which starts the processes of further devices."""

import sys

from tvr_lightning.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
