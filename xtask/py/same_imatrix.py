"""Exits with an error unless two importance matrices have the same tensors, counts and (nearly) sums.

Sums are of squared activations, which differ where an activation before them was rounded the other way: up to 1 %. In a model
of random weights two experts may be so near each other that such a difference decides between them: up to 1 % of the rows
may be with another expert, none may be missing."""

import sys

import gguf
import numpy as np


def tensors(path):
    return {t.name: np.array(t.data, dtype=np.float64) for t in gguf.GGUFReader(path).tensors}


def main(stock_path, hina_path):
    stock, hina = tensors(stock_path), tensors(hina_path)
    if stock.keys() != hina.keys() or not stock:
        sys.exit(f"other tensors: {sorted(stock.keys() ^ hina.keys())[:8]}")
    counts = [name for name in stock if name.endswith(".counts")]
    experts = [name for name in counts if "_exps" in name]
    if not experts or not any(stock[name].any() for name in experts):
        sys.exit("no expert was counted")
    for name in stock:
        if name.endswith(".counts"):
            moved = np.abs(stock[name] - hina[name]).sum() / 2
            if stock[name].sum() != hina[name].sum() or moved > 0.01 * stock[name].sum():
                sys.exit(f"{name}: other counts, {moved:.0f} rows of {stock[name].sum():.0f} are with other experts")
        elif np.abs(stock[name] - hina[name]).sum() > 1e-2 * np.abs(stock[name]).sum():
            sys.exit(f"{name}: other sums")
    print(f"{len(counts)} tensors, {int(sum(stock[name].sum() for name in experts))} expert rows")


main(*sys.argv[1:])
