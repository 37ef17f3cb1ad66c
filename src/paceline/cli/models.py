"""``paceline models``: what can be pulled, and what is here."""

import sys


def models() -> None:
    """List the models that can be pulled by name, and where the files are.

    In a pipe each model is one line, without a heading and with tabs between
    name, size, licence, path (empty: not cached) and description.
    """
    from paceline.models.catalog import CATALOG

    for entry in CATALOG.values():
        size = f"{entry.size / 1e6:.0f} MB"
        if sys.stdout.isatty():
            print(f"{entry.name}  {size}  {entry.licence}\n  {entry.description}")
            print(f"  {entry.path}" if entry.cached else f"  not cached; `paceline pull {entry.name}` fetches it")
        else:
            print(entry.name, size, entry.licence, entry.path if entry.cached else "", entry.description, sep="\t")
