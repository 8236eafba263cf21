"""`python -m ferroflash` prints what `ferroflash.doctor()` says."""

from . import doctor

print(doctor())
