"""Signs for terminals that take no UTF-8: one that all of them have, in the place of each other one."""

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_SIGNS = {
    "█▉▊▋▌": "#", "░": ":", "▒": "=", "▓": "%", "▍▎▏▐": "|", "▀▔": "-", "▁▂▃▄▅▆▇": "_", "▶": "*", "▸›→": ">",
    "◀◂‹←": "<", "▾▼↓": "v", "▴▲↑": "^", "─━═–—−": "-", "│┃║": "|", "╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝": "+", "·": ".", "•": "-",
    "…": "~", "×✗": "x", "✓": "+", "“”": '"', "‘’": "'", "µ": "u", "●○■□◆◇": "o",
}  # fmt: skip
_TABLE = str.maketrans({sign: plain for unicode, plain in _SIGNS.items() for sign in unicode})


class PlainSigns(LineFilter):
    """Line filter that leaves only ASCII on the screen, each sign as wide as before."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(in_ascii(text), style, control) for text, style, control in segments]


def in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = text.replace(" · ", " - ").translate(_TABLE)
    return text if text.isascii() else "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in text)
