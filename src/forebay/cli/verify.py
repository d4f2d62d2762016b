"""`forebay verify`: is everything in this deployment that should be?"""

from __future__ import annotations

from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._options import CommandGroup
from forebay.cli._verifying import run_verify

__all__ = ["app"]

app = CommandGroup(help="Verify.")


@app.command("verify")
@deployment_options
def verify(deployment: Deployment) -> None:
    """Prove from objects and keys alone that nothing is missing or damaged; list orphans.

    As `forebay log verify` for all topics. Exit code 1 where something is wrong; orphans do no harm.
    """
    run_verify(deployment, None)
