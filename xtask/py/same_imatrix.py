"""`same_imatrix.py MODE STOCK HINA [CONTROL]`: exits with an error unless the importance matrices of stock and of HiNa have the same
tensors and are, by MODE,

* `bits`: the same in every number;
* `counts`: the same in every count (how many rows each expert got) but for one row of a tensor, with sums within 1 %;
* `near`: the same in the number of rows of each tensor, with sums within 1 %, and with few rows at other experts.

The router picks experts by values that were rounded to BF16 on their way. A difference in the last bit of a sum moves one of
them by a step sooner or later, and then, in a model of random weights, a row now and then goes to another expert that was
all but equal. CONTROL is stock with another order of sums (without flash attention): HiNa may move as many rows as that, and a few."""

import sys

import gguf
import numpy as np


def tensors(path):
    return {t.name: np.array(t.data, dtype=np.float64) for t in gguf.GGUFReader(path).tensors}


def moved(a, b):
    """Rows that are with other experts, at most over the tensors."""
    return max(np.abs(a[name] - b[name]).sum() / 2 for name in a if name.endswith(".counts"))


def main(mode, stock_path, hina_path, control_path=None):
    stock, hina = tensors(stock_path), tensors(hina_path)
    if stock.keys() != hina.keys() or not stock:
        sys.exit(f"other tensors: {sorted(stock.keys() ^ hina.keys())[:8]}")
    counts = [name for name in stock if name.endswith(".counts")]
    experts = [name for name in counts if "_exps" in name]
    if not experts or not any(stock[name].any() for name in experts):
        sys.exit("no expert was counted")
    for name in stock:
        if mode == "bits" and not np.array_equal(stock[name], hina[name]):
            sys.exit(f"{name}: not the same ({np.abs(stock[name] - hina[name]).sum():g} apart)")
        if name in counts and stock[name].sum() != hina[name].sum():
            sys.exit(f"{name}: other counts")
        if name not in counts and np.abs(stock[name] - hina[name]).sum() > 1e-2 * np.abs(stock[name]).sum():
            sys.exit(f"{name}: other sums")
    rows = int(sum(stock[name].sum() for name in experts))
    text = f"{len(counts)} tensors, {rows} expert rows"
    ours = moved(stock, hina)
    if control_path is None:
        if ours > 1:
            sys.exit(f"{ours:.0f} rows of a tensor are with other experts")
        print(f"{text}, counts the same" if ours == 0 else f"{text}, counts the same but for one row of a tensor")
        return
    theirs = moved(stock, tensors(control_path))
    if ours > 2 * theirs + 4:
        sys.exit(f"{ours:.0f} rows of a tensor are with other experts; {theirs:.0f} in stock without flash attention")
    print(f"{text}; at most {ours:.0f} of a tensor moved, {theirs:.0f} in stock's own control")


main(*sys.argv[1:])
