"""`python -m anon_lab`, which is `anon` where no scripts are installed."""

from anon_lab.cli import app

app()
