"""The rooms and folders of the project with who imports whom, drawn for `docs/architecture.md`.

`python tests/support/structure.py --write` renews the drawing; a test holds it against the code.
"""

import sys
from pathlib import Path

import grimp
import networkx

# In the order of the pictures.
ROOMS = (
    *("cli", "api", "lsp", "client", "components", "tui", "server", "runtime", "planner", "contracts", "blocks"),
    *("plan", "dsl", "records", "text"),
)
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- drawing: begin -->\n", "<!-- drawing: end -->\n"


def folder_of(module: str) -> str:
    """The room and folder that a module stands in: `dsl`, `dsl/syntax`; of deeper folders the outermost."""
    _, room, *rest = module.split(".")
    return room if len(rest) < 2 else f"{room}/{rest[0]}"


def arrows() -> networkx.DiGraph:
    """Return who imports whom, annotations included: folders of one room, and rooms."""
    graph = grimp.build_graph("xtrain")
    found = networkx.DiGraph()
    own = {m for m in graph.modules if m.split(".")[1:2] and m.split(".")[1] in ROOMS}
    for module in own:
        if not graph.find_children(module):
            found.add_node(folder_of(module))
        for other in graph.find_modules_directly_imported_by(module) & own:
            here, there = folder_of(module), folder_of(other)
            if here.split("/")[0] != there.split("/")[0]:
                here, there = here.split("/")[0], there.split("/")[0]
                found.add_edge(f"{here}:", f"{there}:")
            elif here != there and "/" in here and "/" in there:
                found.add_edge(here, there)
    return found


def drawing() -> str:
    """The drawing as Markdown: a Mermaid picture of the rooms, and one of the folders of each."""
    found = arrows()
    rooms = found.subgraph([n for n in found if n.endswith(":")])
    pages = ["Rooms:\n\n" + _mermaid(networkx.relabel_nodes(rooms, {n: n[:-1] for n in rooms}))]
    for room in ROOMS:
        inner = found.subgraph([n for n in found if n.startswith(f"{room}/")])
        if inner.number_of_edges():
            pages.append(f"Folders of `{room}/`:\n\n" + _mermaid(networkx.relabel_nodes(inner, _short(inner))))
    return "\n".join(pages)


def _short(graph: networkx.DiGraph) -> dict[str, str]:
    return {n: n.split("/")[1] for n in graph}


def _mermaid(graph: networkx.DiGraph) -> str:
    """Only the arrows that no others imply. Raises networkx.NetworkXError where there is a circle."""
    reduced = networkx.transitive_reduction(graph)
    lines = [f"    {a} --> {b}" for a, b in sorted(reduced.edges)]
    return "```mermaid\nflowchart TD\n" + "\n".join(lines) + "\n```\n"


def page_with(drawn: str) -> str:
    """The page of the architecture with a drawing in its place."""
    text = PAGE.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + drawn + text[text.index(END) :]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(drawing()))
    else:
        print(drawing())
