#!/usr/bin/env python3
"""Draws the pictures of attention/README.md, attention/pictures/*.svg. Sizes and orders are the
kernels' own.

python3 scripts/pictures.py
"""

import itertools
import math
from html import escape

from results import ROOT, arguments, check_stdout

INK, GREY, LIGHT, WHITE, HATCH = "#1a1a1a", "#595959", "#d5d5d5", "#ffffff", "url(#hatch)"
# Okabe and Ito's palette: distinct for colour-blind eyes too.
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()
)
DEFINITIONS = (
    '<marker id="tip" refX="9" refY="4" markerWidth="9" markerHeight="8" '
    'markerUnits="userSpaceOnUse"\norient="auto"><path d="M0 0L9 4L0 8z"/></marker>\n'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    f'<path d="M0 6L6 0M-1 1L1 -1M5 7L7 5"\nstroke="{GREY}"/></pattern>'
)


class Picture:
    """An SVG, 800 wide and as high as needed, on a light panel, so that it looks the same on white
    and on dark pages."""

    def __init__(self):
        self.parts, self.bottom = [], 0

    def add(self, tag, content="", **attributes):
        """An element. None leaves an attribute out, numbers are rounded, "_" in a name is "-"."""
        shown = [
            f'{name.replace("_", "-")}="{round(x, 2) if isinstance(x, float) else x}"'
            for name, x in attributes.items()
            if x is not None
        ]
        self.parts.append(f"<{' '.join([tag, *shown])}>{content}</{tag}>")

    def line(self, *points, tip=False, fill="none", stroke=INK, width=1.5, **more):
        """Through all points. With a fill it is a polygon."""
        self.add(
            "polyline",
            points=" ".join(f"{x:g},{y:g}" for x, y in points),
            fill=fill,
            stroke_width=width,
            stroke=stroke if fill == "none" else "none",
            marker_end="url(#tip)" if tip else None,
            **more,
        )

    def text(self, x, y, *lines, at=None, bold=False, step=18):
        """Lines below one another, from baseline y on. x is their start, or as `at` says their
        middle or end."""
        for i, words in enumerate(lines):
            self.add(
                "text",
                escape(str(words), quote=False),
                x=x,
                y=y + i * step,
                text_anchor=at,
                font_weight="bold" if bold else None,
            )
            self.bottom = max(self.bottom, y + i * step + 5)

    def middle(self, x, y, *lines, **style):
        self.text(x, y, *lines, at="middle", **style)

    def box(self, x, y, width, height, *lines, fill="none", stroke=INK, bold=False, **more):
        """A rectangle, with lines of text in its middle."""
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, **more)
        self.middle(
            x + width / 2,
            y + height / 2 + 12.5 - 8 * max(1, len(lines)),
            *lines,
            bold=bold,
            step=16,
        )
        self.bottom = max(self.bottom, y + height)

    def svg(self, about):
        """The file. The first sentence of `about` is its title, the others describe it."""
        title, desc = " ".join(about.split()).split(". ", 1)
        height = math.ceil(self.bottom) + 14
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" role="img" '
                f'fill="{INK}" font-family="sans-serif" font-size="13">',
                f"<title>{title}</title>",
                f"<desc>{desc}</desc>",
                DEFINITIONS,
                f'<rect x="0.5" y="0.5" width="799" height="{height - 1}" rx="8" '
                f'fill="{WHITE}" stroke="{LIGHT}"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def causal(p):
    """Tiles of the causal square. A row for each 64 queries, a column for each 128 keys. Tiles are
    whole below the diagonal, masked on it, not loaded above it. Blocks take tiles of 192 queries
    from the last to the first."""
    T, Bc, Br = 1024, 128, 192  # flash_bf16_sm90's forward at HS 64
    left, top, u = 112, 74, 26  # u: 64 queries or keys
    kinds = {
        "whole": (SKY, "", ["whole: no mask code"]),
        "diagonal": (HATCH, "", ["diagonal: the hatched", "elements are masked"]),
        "half": (HATCH, "", ["half a tile: 64 of its", "128 keys are multiplied"]),
        "other": (LIGHT, "–", ["loaded for another", "row, passed over"]),
        "never": (WHITE, "·", ["never loaded"]),
    }

    def tile(kind, x, y):
        fill, sign, _ = kinds[kind]
        p.box(x, y, 2 * u, u, sign, fill=fill, stroke=LIGHT if kind == "never" else INK)
        if kind == "diagonal":
            p.line((x, y), (x + u, y), (x + 2 * u, y + u), (x, y + u), fill=ORANGE)
        if kind == "half":
            p.line((x, y), (x + u, y + u), (x, y + u), fill=ORANGE)
            p.box(x + u, y, u, u, "½", fill=WHITE)

    p.middle(left + 8 * u, 24, "keys →")
    p.text(12, 64, "taken")
    p.text(58, 48, "tiles of", "keys", step=16)
    for j in range(T // Bc):
        p.text(left + 2 * u * j + 2, 64, Bc * j)
    for n in range(math.ceil(T / Br)):  # tiles of queries as work_item() numbers them
        q0, k_tiles = T - (n + 1) * Br, math.ceil((T - n * Br) / Bc)
        for first_q in range(max(q0, 0), q0 + Br, 64):  # a warpgroup's, as attend() has it
            my_tiles, unmasked = math.ceil((first_q + 64) / Bc), (first_q + 1) // Bc
            for j in range(T // Bc):
                masked = "half" if first_q + 64 - j * Bc <= 64 else "diagonal"
                kind = (
                    "whole"
                    if j < unmasked
                    else masked
                    if j < my_tiles
                    else "other"
                    if j < k_tiles
                    else "never"
                )
                tile(kind, left + 2 * u * j, top + first_q // 64 * u)
        begin, end = top + max(q0, 0) // 64 * u, top + (q0 + Br) // 64 * u
        p.text(18, (begin + end) / 2 + 5, ["1st", "2nd", "3rd", "4th", "5th", "6th"][n], bold=True)
        p.text(72, (begin + end) / 2 + 5, k_tiles)
        p.box(10, begin, left + 16 * u - 10, end - begin, stroke_width=3)
    for i, (kind, (_, _, lines)) in enumerate(kinds.items()):
        tile(kind, 546, 76 + 42 * i)
        p.text(610, 102 - 8 * len(lines) + 42 * i, *lines, step=16)
    p.text(
        546,
        318,
        "A block keeps 192 queries, each",
        "of its 3 warpgroups 64: a row.",
        "K and V pass by, from the",
        "diagonal to key 0.",
        "",
        "Blocks take tiles from the end,",
        "the longest first. The last one",
        "has 64 queries. Two of its",
        "warpgroups have none.",
    )


def online(p):
    """The softmax state of one row before and after a tile. Bars of exp(S − m): of four keys, of a
    tile of four more, and of all eight, where the first four have shrunk. Below stand m, l and
    O."""
    S = [1, 3, 2, 0, 2, 5, 1, 4]
    V = [(1, 0), (2, 1), (0, 1), (1, 1), (0, 2), (1, 1), (3, 0), (2, 2)]

    def pair(O):
        return f"({O[0]:.3f}, {O[1]:.3f})"

    def bars(x, heading, keys, m, *names):
        """Draws keys relative to m. Returns rowsum P and P V, and prints them under these names."""
        P, end = [math.exp(S[j] - m) for j in keys], x + 26 * len(keys)
        l, O = sum(P), [sum(weight * V[j][d] for weight, j in zip(P, keys)) for d in (0, 1)]
        p.text(x, 34, heading, bold=True)
        p.line((x - 4, 60), (end, 60), stroke=GREY, stroke_dasharray="4 3")
        for i, (j, height) in enumerate(zip(keys, P)):
            p.box(x + 26 * i, 150 - 90 * height, 20, 90 * height, fill=SKY if j < 4 else ORANGE)
            p.middle(x + 26 * i + 10, 168, S[j])
        p.line((x - 4, 150), (end, 150))
        p.text(end + 6, 64, f"1 = exp({m} − {m})")
        p.text(end + 6, 168, "S")
        p.text(x, 196, f"{names[0]} = {m}", f"{names[1]} = {l:.3f}", f"{names[2]} = {pair(O)}")
        return l, O

    m, new_m = max(S[:4]), max(S)
    l, O = bars(24, "before: keys 0–3", range(4), m, "m", "l", "O")
    tile_l, tile_O = bars(
        244, "the tile: keys 4–7", range(4, 8), new_m, f"m' = max({m}, {new_m})", "rowsum P", "P V"
    )
    new_l, new_O = bars(466, "after: keys 0–7", range(8), new_m, "m", "l", "O")
    factor = math.exp(m - new_m)
    for x, old, more in zip((new_l, *new_O), (l, *O), (tile_l, *tile_O)):
        assert math.isclose(x, factor * old + more)
    p.text(
        24,
        276,
        f"factor = exp(m − m') = exp({m} − {new_m}) = {factor:.3f}: "
        "so much the first four bars shrink.",
        f"l = {factor:.3f} · {l:.3f} + {tile_l:.3f} = {new_l:.3f}",
        f"O = {factor:.3f} · {pair(O)} + {pair(tile_O)} = {pair(new_O)}",
        f"After the last tile out = O / l = {pair([x / new_l for x in new_O])}, "
        "the softmax of all keys times V.",
        f"V's rows are {', '.join(map(str, V))}. HS is 2, scale 1.",
        step=26,
    )


def fragments(p):
    """The accumulator of m16n8k16 laid over the A operand. Two grids of 16 × 16 elements. In both,
    lanes 5 and 22 hold the same places. Other cells show the lane that holds them."""
    # As in mma_m16n8k16_bf16.
    looks = {
        5: {"fill": ORANGE, "stroke_width": 2},
        22: {"fill": SKY, "stroke_width": 2, "stroke_dasharray": "5 3"},
    }
    for x0, heading in (
        (30, "two accumulators of S, L and R, fp32"),
        (426, "the A operand of P V, bf16"),
    ):
        p.middle(x0 + 176, 26, heading, bold=True)
        for i in range(16):
            p.middle(x0 + 22 * i + 11, 54, i)
            p.text(x0 - 5, 77 + 20 * i, i, at="end")
        held = [
            (r % 8 * 4 + c % 4, r // 8, c // 4, x0 + 44 * c, 62 + 20 * r)
            for r in range(16)
            for c in range(8)
        ]
        held.sort(key=lambda cell: cell[0] in looks)  # outlines last
        for lane, lower, right, x, y in held:
            words = (
                f"{'LR'[right]}{2 * lower} {'LR'[right]}{2 * lower + 1}"
                if x0 < 400
                else f"a[{2 * right + lower}]"
            )
            p.box(
                x, y, 44, 20, words if lane in looks else lane, **looks.get(lane, {"stroke": LIGHT})
            )
        p.box(x0, 62, 352, 320, stroke_width=2)
    p.line((206, 62), (206, 382), width=2)
    p.line((386, 222), (408, 222), tip=True)
    p.box(30, 400, 352, 30, "lane 5: rows 1 and 9, columns 2, 3, 10, 11", **looks[5])
    p.box(30, 440, 352, 30, "lane 22: rows 5 and 13, columns 4, 5, 12, 13", **looks[22])
    p.text(
        426,
        402,
        "Two elements a register, packed in place:",
        "a[0] = pack(L0, L1),  a[1] = pack(L2, L3),",
        "a[2] = pack(R0, R1),  a[3] = pack(R2, R3).",
        "Other numbers are lanes.",
        step=22,
    )


def swizzle(p):
    """A tile in shared memory, plain and swizzled. Eight rows of eight pieces of 16 bytes. Piece 3
    of every row is marked. Plain, all lie in the same four banks. Swizzled, each has banks of its
    own."""
    colours = [ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK, "#999999"]  # of bank groups
    for x0, swizzled, heading, *result in (
        (
            62,
            False,
            "plain: piece c at place c",
            "Piece 3 of all rows lies in banks 12–15.",
            "ldmatrix reads them in 8 passes.",
        ),
        (
            444,
            True,
            "swizzled: piece c of row r at c ^ (r % 8)",
            "Each piece 3 lies in banks of its own.",
            "ldmatrix reads all eight in one pass.",
        ),
    ):
        p.middle(x0 + 164, 30, heading, bold=True)
        p.text(x0 - 6, 64, "bank", at="end")
        for i in range(8):
            p.middle(x0 + 41 * i + 20.5, 64, 4 * i)
            p.text(x0 - 6, 94 + 30 * i, f"row {i}", at="end")
        for r, place in itertools.product(range(8), range(8)):
            c, x, y = place ^ r if swizzled else place, x0 + 41 * place, 74 + 30 * r
            p.box(
                x,
                y,
                41,
                30,
                c,
                fill=colours[place],
                stroke=WHITE,
                fill_opacity=0.7 if c == 3 else 0.3,
                bold=c == 3,
            )
            p.box(x + 2, y + 2, 37, 26, stroke_width=3) if c == 3 else None
        p.text(x0, 340, *result)
    p.text(
        62,
        384,
        "A number is the piece c that lies there, 16 bytes or 4 banks. "
        "Columns show their first bank.",
    )


def descriptor(p):
    """What a wgmma descriptor says of a tile. K and V as two panels of 64 columns, in groups of 8
    rows. A step over K is 16 columns of all rows. A step over V, transposed, is 16 rows of both
    panels."""
    high, wide = 42, 128  # a group of 8 rows, a panel of 64 columns
    for x0, heading, read, *notes in (
        (
            70,
            "K for Q Kᵀ: a row is one n, its columns are k",
            [(102, 62, 32, 168), (102, 258, 32, high)],
            "start: +32 bytes a k-step, +16 384 a panel",
            "stride: 1024 bytes, the next 8 rows",
            "leading: not used",
        ),
        (
            462,
            "V for P V, transposed: a row is one k",
            [(462, 146, wide, 84), (622, 146, wide, 84)],
            "start: +2048 bytes a k-step",
            "stride: 1024 bytes, the next 8 rows",
            "leading: 16 384 bytes, the next 64 columns",
        ),
    ):
        p.text(x0 - 54, 28, heading, bold=True)
        for rectangle, fill in itertools.product(read, (ORANGE, HATCH)):
            p.box(*rectangle, fill=fill, stroke="none")
        for side, x in enumerate((x0, x0 + 160)):
            p.middle(x + 64, 52, f"columns {64 * side}–{64 * side + 63}")
            p.middle(x + 64, 249, "⋮", bold=True)
            for group, y in ((0, 62), (1, 104), (2, 146), (3, 188), (15, 258)):
                for i in range(1, 8):
                    p.line(
                        (x, y + i * high / 8), (x + wide, y + i * high / 8), stroke=LIGHT, width=0.7
                    )
                p.box(x, y, wide, high, stroke_width=1.5)
                p.text(x0 - 8, y + 14, "" if side else 1024 * group, at="end")
        p.add("circle", cx=read[0][0], cy=read[0][1], r=5, fill=BLUE, stroke=WHITE)
        p.text(x0 - 54, 326, *notes)
    p.line((592, 188), (620, 188), tip=True)
    p.add("circle", cx=22, cy=394, r=5, fill=BLUE)
    p.text(
        34,
        399,
        "start of k-step 1, which reads what is hatched. Numbers are bytes from the tile's start.",
        "A row has 128 bytes: 8 pieces of 16 bytes, swizzled. The hardware finds them.",
    )


def products(p):
    """Seven products in two kernels, five in one. A column for each kernel: what a block keeps,
    what passes by, its products, and where each of dQ, dK and dV is summed."""
    p.middle(272, 28, "flash_bf16: two kernels, 3 + 4 = 7 products", bold=True)
    p.middle(664, 28, "flash_bf16_sm90: 5 products", bold=True)
    p.line((531, 12), (531, 462), stroke=LIGHT, width=2)
    fills = {"one tile": SKY, "registers": GREEN, "sum in memory": ORANGE}
    four = ["Sᵀ = K Qᵀ", "dPᵀ = V dOᵀ", "dV += Pᵀ dO", "dK += dSᵀ Q"]
    for x, name, kept, passing, rows in (
        (16, "dq_kernel", "queries", "K, V", ["S = Q Kᵀ", "dP = dO Vᵀ", "", "", "dQ += dS K"]),
        (280, "dkdv_kernel", "keys", "Q, dO", four),
        (546, "backward_kernel", "keys", "Q, dO", [*four, "dQ = dS K"]),
    ):
        p.text(x, 58, name, bold=True)
        p.line((x, 70), (x + 112, 182), (x, 182), fill=LIGHT)
        if kept == "queries":
            p.line((x, 140), (x + 70, 140), (x + 98, 168), (x, 168), fill=SKY)
            p.line((x + 6, 154), (x + 80, 154), tip=True)
        else:
            p.line((x + 28, 98), (x + 56, 126), (x + 56, 182), (x + 28, 182), fill=SKY)
            p.line((x + 42, 118), (x + 42, 178), tip=True)
        p.box(x, 70, 112, 112)
        p.text(x + 122, 90, "A block keeps", f"128 {kept}.", f"{passing} pass by.")
        for y, product in ((200 + 38 * i, product) for i, product in enumerate(rows) if product):
            where = (
                "registers"
                if "+=" in product
                else "sum in memory"
                if "dQ" in product
                else "one tile"
            )
            p.box(x, y, 236, 30, fill=fills[where], fill_opacity=0.55)
            p.text(x + 8, y + 20, product)
            p.text(x + 228, y + 20, where, at="end")
    p.text(
        16,
        420,
        "S and dP are computed twice. dQ, dK and dV are",
        "summed in registers, each by one owner.",
        "Blocks need not wait for one another.",
    )
    p.text(
        546,
        420,
        "dK and dV have one owner each.",
        "dQ sums over key tiles of",
        "several blocks. They take turns.",
    )


def turns(p):
    """Turns of key tiles over query tiles. Two tables, time across, a row for each key tile.
    Forward, key tile 3 begins sum q3 and key tile 0 ends it. Back, key tile 0 begins it and key
    tile 3 ends it."""
    tiles = 4
    styles = {
        "=": (SKY, "begins the sum: stores"),
        "+=": (ORANGE, "adds to the sum"),
        "→ dQ": (GREEN, "ends it: fetches, adds, rounds"),
    }
    for x0, forward, heading, *below in (
        (
            88,
            True,
            "forward: all groups of heads but the last",
            "A key tile starts at its diagonal. Each finds",
            "its turn come. The longest item is taken last.",
        ),
        (
            480,
            False,
            "back: the last group of heads",
            "All key tiles start at the last query, so they",
            "queue once. The shortest item is taken last.",
        ),
    ):
        p.text(x0 - 74, 28, heading, bold=True)
        p.text(x0 - 74, 56, "time →")
        for row in range(tiles):  # in the order of their tickets
            k, y = tiles - 1 - row if forward else row, 66 + 56 * row
            p.middle(x0 + 34 + 75 * row, 56, row)
            p.text(x0 - 8, y + 25, f"key tile {k}", at="end")
            for n in range(tiles - k):
                q, t = (k + n, n) if forward else (tiles - 1 - n, n + row)
                turn = q - k if forward else k  # as sender() counts, q being last_k_tile()
                sign = "→ dQ" if turn == q else "=" if turn == 0 else "+="
                p.box(
                    x0 + 75 * t,
                    y,
                    68,
                    40,
                    f"q{q} {sign}",
                    fill=styles[sign][0],
                    stroke_width=3 if q == 3 else 1,
                )
                if q == 3 and row < tiles - 1:
                    p.line((x0 + 75 * t + 60, y + 42), (x0 + 75 * t + 82, y + 54), tip=True)
        p.text(x0 - 74, 312, *below)
    for x, (sign, (fill, meaning)) in zip((14, 264, 476), styles.items()):
        p.box(x, 346, 60, 30, sign, fill=fill)
        p.text(x + 68, 366, meaning)


def roles(p):
    """A block of flash_bf16_sm90's forward. A producer thread, stages in shared memory, three
    consumer warpgroups. Solid arrows are data. Dashed ones are arrivals that give room back."""

    def arrow(x0, x1, y, label, **more):
        p.line((x0, y), (x1, y), tip=True, **more)
        p.middle((x0 + x1) / 2, y - 6, label)

    p.box(16, 16, 174, 316, fill=YELLOW, rx=6, fill_opacity=0.45)
    p.box(280, 16, 240, 368, fill="#f5f5f5", stroke=GREY, rx=6)
    for i in (12, 6, 0):
        p.box(612 + i, 16 + i, 160, 368, fill="#b3dcf4", rx=6)
    for x, heading, below in (
        (103, "producer", "one thread"),
        (400, "shared memory", "200 KiB of 227"),
        (692, "3 consumers", "64 queries each"),
    ):
        p.middle(x, 40, heading, bold=True)
        p.middle(x, 58, below)
    for y, x, places, size, job, *work in (
        (80, "q", 2, "3 × 8 KiB", "takes queries"),
        (164, "k", 4, "16 KiB", "loads tiles of K", "S = Q Kᵀ", "P = exp(S − m)"),
        (248, "v", 4, "16 KiB", "loads tiles of V", "O += P V"),
    ):
        p.middle(103, y + 20, f"waits for {x}_empty", job)
        p.middle(692, y + 20, f"waits for {x}_full", *work)
        for i in range(places):
            p.box(
                292 + i * 216 / places,
                y,
                216 / places - 4,
                40,
                f"{x.upper()} {i}",
                size,
                fill=WHITE,
            )
        arrow(190, 290, y + 20, "TMA")
        arrow(508, 610, y + 20, f"{x}_full")
        arrow(612, 192, y + 61, f"{x}_empty", stroke_dasharray="6 4")
    p.box(292, 332, 212, 40, "out", "3 × 8 KiB", fill=WHITE)
    arrow(612, 506, 352, "O / l")
    arrow(290, 192, 364, "TMA")
    p.text(16, 369, "out, in global memory")
    p.text(
        16,
        420,
        "A full barrier completes when its bytes have landed. q_empty needs the 128 threads of its",
        "warpgroup, k_empty and v_empty one arrival of each of the 12 consumer warps.",
    )


@check_stdout()
def main():
    arguments(__doc__).parse_args()
    for draw in causal, online, fragments, swizzle, descriptor, products, turns, roles:
        picture = Picture()
        draw(picture)
        path = ROOT / "attention" / "pictures" / f"{draw.__name__}.svg"
        path.write_text(picture.svg(draw.__doc__), encoding="utf-8")


if __name__ == "__main__":
    main()
