"""`python -m deploy`: the same as `slipstream`."""

from deploy.cli import main

main()
