"""What the page of a server has in place of steps: at a glance, and what each kind of request does."""

from collections import Counter

from xtrain.planner.costs.headroom import headroom
from xtrain.planner.plan import Plan
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.serving.fit import slots_that_fit
from xtrain.planner.serving.graph import SETUP
from xtrain.planner.serving.slots import slots_of
from xtrain.planner.units import count_text, plural

VERDICTS = ("fail", "warn", "unknown", "pass")


def show_server_glance(page: Page, plan: Plan) -> None:
    """Whether it fits, how many adapters do, and where it listens."""
    args, room = plan.node(SETUP).args, headroom(plan)
    counts = Counter(check.status for check in plan.checks)
    fit = slots_that_fit(plan)
    room_text = "how many fit is unknown" if fit is None else f"there is room for {fit:,}"
    page.line()
    page.line(f"  memory  {room.verdict}: {room.text}")
    trained = (
        f"{plural(args['adapters'], 'adapter')}; {room_text}" if slots_of(plan) else "none: one client trains the model"
    )
    page.line(f"  slots   {trained}")
    key = f"key in {args['key']}" + ("" if args["key_needed"] else ", or one that it makes and prints")
    scheme = "https" if args["certificate"] else "http"
    page.line(f"  listens {scheme}://{args['host']}:{args['port']} as `{args['model_name']}`, {key}")
    page.line(f"  checks  {', '.join(f'{counts[each]} {each}' for each in VERDICTS if counts[each])}")


def show_requests(page: Page, plan: Plan, detail: Detail) -> None:
    """The nodes of requests: all ranks run each, in the order in which requests come."""
    nodes = plan.of_kind("request")
    if not nodes:
        return
    args = plan.node(SETUP).args
    longest = f"of up to {args['texts']:,} texts of {args['max_tokens']:,} tokens; {args['queue']:,} may wait"
    page.heading("REQUESTS", f"{longest}; {count_text(plan.estimates.flops_per_token)} operations a token")
    rows = [(node.id.removeprefix("request."), node.does) for node in nodes]
    page.described(rows, wraps=True)
