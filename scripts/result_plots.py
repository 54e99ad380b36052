"""What the scripts that plot dev/results share: the command, and SVG files beside the rows, alike each time."""
import argparse
import pathlib
import sys

from plot import STYLE
from readme_tables import ROOT, rows


def main(doc, benches, make, run_first):
    """Writes dev/results/<gpu>/<name>.svg for each name and figure of make(plt, {bench: its rows}), figures of None
    left out. `benches` has the rows' benches and what they are asked for, see rows(). `run_first` is the command whose rows are missing if there is nothing to plot."""
    name = pathlib.Path(sys.argv[0]).name
    arg = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--root", type=pathlib.Path, default=ROOT, help=argparse.SUPPRESS)  # for tests
    a = arg.parse_args()
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as e:
        sys.exit(f"{name} needs matplotlib ({e}): pip install -r scripts/requirements.txt")
    plt.rcParams.update({**STYLE, "axes.xmargin": 0.05})
    written = []
    for folder in sorted((a.root / "dev" / "results").glob("*/")):
        paths = {bench: folder / f"{bench}.jsonl" for bench in benches}
        found = {bench: rows(path, **benches[bench]) if path.exists() else [] for bench, path in paths.items()}
        for title, figure in make(plt, found).items():
            if figure:
                written.append(folder / f"{title}.svg")
                # Neither date nor version: the same rows give the same file.
                figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
                plt.close(figure)
    if not written:
        sys.exit(f"{name}: {a.root / 'dev' / 'results'}: no rows; run {run_first} first")
    print("\n".join(map(str, written)))
