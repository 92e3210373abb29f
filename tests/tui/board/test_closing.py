"""What is read while the dashboard is being closed."""

from dashboards import opened, played
from made_runs import made_run


def test_a_board_that_comes_after_the_last_screen_is_gone_draws_nothing(tmp_path):
    run = made_run(tmp_path / "run", "dense", logged=5).directory

    async def play():
        async with opened(run) as (app, _):
            reading = app._reading
        assert not app.screen_stack
        reading.newest = app.board
        await app.on_polled()
        app.draw(anew=True)
        assert app.fault is None

    played(play())
