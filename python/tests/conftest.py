"""Settings that must precede the first import of torch."""

import os

# torch's threads spin while they wait for one another, and take the cores from everything else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
