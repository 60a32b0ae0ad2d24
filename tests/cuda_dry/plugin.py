"""A plugin of pytest that installs the stand-in device before any test is imported."""

from tests.cuda_dry import install

install()
