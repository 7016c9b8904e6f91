"""Human bases of a chromosome's alignment (MAF) as one FASTA record: see README.md beside this file."""

import argparse
import gzip
import lzma
from pathlib import Path


def blocks(path: str, species: str) -> list[tuple[int, str]]:
    """(begin, bases in upper case) of each block of a species, in the order of the chromosome."""
    found = []
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith(f"s {species} "):
                _, _, begin, length, strand, _, aligned = line.split()
                bases = aligned.replace("-", "").upper()
                if strand != "+" or len(bases) != int(length):
                    raise ValueError(f"{path}: block at {begin} is on strand {strand} with {len(bases)} of {length} bases")
                found.append((int(begin), bases))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("maf", help="the alignment, .maf.gz")
    parser.add_argument("out", type=Path, help="the file to write, .fa.xz")
    parser.add_argument("--species", default="Hsap.22", help="as the alignment names it (default: %(default)s)")
    parser.add_argument("--begin", type=int, default=0, help="first position")
    parser.add_argument("--bases", type=int, default=10**9, help="at most so many, in whole blocks")
    options = parser.parse_args()
    taken, total = [], 0
    for begin, bases in blocks(options.maf, options.species):
        if begin >= options.begin:
            if total + len(bases) > options.bases:
                break
            taken.append((begin, bases))
            total += len(bases)
    first, end = taken[0][0], taken[-1][0] + len(taken[-1][1])
    header = f">human chromosome 22, GRCh37 {first}-{end}, {len(taken)} aligned blocks end to end"
    text = f"{header}\n{''.join(bases for _, bases in taken)}\n"
    options.out.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{total} bases in {len(taken)} blocks, {first} to {end}")


if __name__ == "__main__":
    main()
