"""What the keys of a plot make of what is seen."""

from xtrain.tui.curves.viewport import SMOOTHINGS, Viewport

RUN = (0.0, 1000.0)


def test_at_first_all_is_seen_also_as_it_grows() -> None:
    assert Viewport().seen(RUN) == RUN
    assert Viewport().seen((0, 2000)) == (0, 2000)
    assert Viewport().seen((5, 5)) == (5, 5)


def test_zooming_in_stays_with_the_newest_point() -> None:
    view = Viewport().zoomed(2, RUN)
    assert view.seen(RUN) == (500, 1000)
    assert view.seen((0, 1100)) == (600, 1100)


def test_zooming_stays_with_the_cursor_and_else_with_the_middle() -> None:
    assert Viewport(cursor=250).zoomed(2, RUN).seen(RUN) == (125, 625)
    assert Viewport(span=400, right=600).zoomed(2, RUN).seen(RUN) == (300, 500)
    assert Viewport(span=400, right=600).zoomed(2, RUN, 200).seen(RUN) == (200, 400)


def test_zooming_ends_at_one_step_and_at_the_whole() -> None:
    view = Viewport()
    for _ in range(50):
        view = view.zoomed(2, RUN)
    assert view.span == 1
    for _ in range(50):
        view = view.zoomed(0.5, RUN)
    assert view == Viewport()
    assert Viewport().zoomed(2, (5, 5)) == Viewport()


def test_panning_ends_at_both_ends_and_follows_again_at_the_last() -> None:
    view = Viewport(span=100).panned(-0.25, RUN)
    assert view.seen(RUN) == (875, 975)
    assert view.seen((0, 1500)) == (875, 975)  # it does not run away
    assert Viewport(span=100).panned(-100, RUN).seen(RUN) == (0, 100)
    assert view.panned(5, RUN) == Viewport(span=100)
    assert Viewport().panned(-1, RUN) == Viewport()


def test_the_cursor_is_kept_in_sight() -> None:
    view = Viewport(span=100, right=500)
    assert view.pointing(450, RUN) == Viewport(span=100, right=500, cursor=450)
    assert view.pointing(300, RUN).seen(RUN) == (300, 400)
    assert view.pointing(700, RUN).seen(RUN) == (600, 700)
    assert view.pointing(5000, RUN).cursor == 1000
    assert view.pointing(450, RUN).pointing(None, RUN) == view


def test_smoothings_come_round() -> None:
    view, seen = Viewport(), []
    for _ in SMOOTHINGS:
        seen.append(view.smoothing)
        view = view.smoother()
    assert seen == [0, 0.9, 0.99, 0.999] and view == Viewport()


def test_what_was_chosen_is_said() -> None:
    assert Viewport().describe() == ()
    assert Viewport(log=True, smoothing=0.99, span=5).describe() == ("log", "smoothed 0.99", "zoomed")
