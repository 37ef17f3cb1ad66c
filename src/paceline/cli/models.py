"""``paceline models``: what can be pulled, and what is here."""


def models() -> None:
    """List the models that can be pulled by name."""
    from rich.console import Console
    from rich.table import Column, Table

    from paceline.models.catalog import CATALOG

    table = Table("name", "size", "licence", Column("file", overflow="fold"), "what it is")
    for entry in CATALOG.values():
        place = str(entry.path) if entry.cached else "not cached"
        table.add_row(entry.name, f"{entry.size / 1e6:.0f} MB", entry.licence, place, entry.description)
    Console().print(table)
