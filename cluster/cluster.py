"""`python3 cluster/cluster.py up`: see `sluice_cluster.cli`."""

import sys

from sluice_cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
