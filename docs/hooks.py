"""Makes a site of the repository as it lies, so that every link holds here and there; used by mkdocs.yml."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = (
    "README.md",
    "CITATION.cff",
    "docs/*.md",
    "docs/*.css",
    "docs/images/*",
    "results/**/*",
    "benchmarks/results/*",
    "examples/*.py",
)
REFERENCE = "docs/reference.md"
PUBLIC = (
    ("anon_optim", "Anon Guard Storage Diagnostics decay_groups state_bytes"),
    ("anon_optim", "measure_adaptivity relative_adaptivity Adaptivity AdaptivityMonitor AdaptivityReading"),
    ("anon_optim", "Box L2Ball Simplex HalfSpace"),
    ("anon_optim.optax", "anon scale_by_anon measure_adaptivity ScaleByAnonState"),
)


def on_files(files: Files, config: Any) -> Files:
    root = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern) if path.is_file()}):
        files.append(File(path.relative_to(root).as_posix(), str(root), config.site_dir, config.use_directory_urls))
    names = (f"::: {module}.{name}" for module, names in PUBLIC for name in names.split())
    files.append(File.generated(config, REFERENCE, content="\n\n".join(["# Reference", *names])))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Without Sphinx's roles and double colons, which docstrings have for those who read them as text."""
    return re.sub(r":(?:class|func|meth):<code>([^<]*)</code>", r"<code>\1</code>", html).replace("::</p>", ":</p>")
