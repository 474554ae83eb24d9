#!/usr/bin/env python3
"""Checks the pages of docs/, which are a book.

    scripts/check-book.py                  links, the summary, the marks of shell blocks, quoted errors
    scripts/check-book.py --commands PAGE  prints the shell blocks of a page that are marked "Run in CI"
    scripts/check-book.py --html FOLDER    the links of the book that mdBook has built there
"""

import html.parser
import re
import sys
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# How pages link to files that are not in the book.
REPOSITORY = re.compile(r"https://github\.com/burn-shard/burn-shard/(?:blob|tree)/main/")
# What stands in a line of its own below each shell block.
RUN = "*Run in CI.*"
NOT_RUN = "*Not run in CI"
# Texts of errors are in lines of their own.
QUOTE = re.compile(r"(`+) ?(.+?) ?\1")

faults: list[str] = []


def fault(where: Path, line: int, what: str) -> None:
    faults.append(f"{where.relative_to(ROOT)}:{line}: {what}")


class Page:
    """A file of Markdown: its text outside of code, its blocks of code."""

    def __init__(self, path: Path):
        self.path = path
        # Number and text of each line that is not code.
        self.prose: list[tuple[int, str]] = []
        # Number of the first line, language, text, and the next line that is not empty.
        self.blocks: list[tuple[int, str, str, str]] = []
        lines = path.read_text(encoding="utf-8").splitlines()
        start = language = None
        for number, line in enumerate(lines, 1):
            if start is None and (fence := re.match(r"```(\S*)", line)):
                start, language = number, fence[1]
            elif start is None:
                self.prose.append((number, line))
            elif line == "```":
                after = next((line for line in lines[number:] if line), "")
                text = "\n".join(lines[start : number - 1]) + "\n"
                self.blocks.append((start, language, text, after))
                start = None
        if start is not None:
            fault(path, start, "a block of code that does not end")

    def anchors(self) -> set[str]:
        """The anchors of headings, as GitHub and mdBook make them."""
        found: dict[str, int] = {}
        anchors = set()
        for _, line in self.prose:
            if heading := re.match(r"#{1,6} (.+)", line):
                text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
                slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
                count = found.get(slug, 0)
                found[slug] = count + 1
                anchors.add(f"{slug}-{count}" if count else slug)
            elif include := re.fullmatch(r"\{\{#include (\S+):\w+\}\}", line):
                anchors |= Page(self.path.parent / include[1]).anchors()
        return anchors

    def links(self):
        """Number of the line and target of each link and picture."""
        for number, line in self.prose:
            without_code = re.sub(r"(`+).+?\1", "", line)
            # A link's text may be code.
            for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
                yield number, target


def check_links(page: Page) -> None:
    for number, target in page.links():
        target = urllib.parse.unquote(target)
        if repository := REPOSITORY.match(target):
            base, target = ROOT, target[repository.end() :]
        elif re.match(r"[a-z]+:", target):
            continue
        else:
            base = page.path.parent
        name, _, anchor = target.partition("#")
        path = (base / name).resolve() if name else page.path
        if not path.exists():
            fault(page.path, number, f"{name} is not there")
        elif page.path.is_relative_to(DOCS) and base != ROOT and not path.is_relative_to(DOCS):
            fault(page.path, number, f"{name} is not in the book: link to it on GitHub")
        elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors():
            fault(page.path, number, f"{path.name} has no heading #{anchor}")


def check_summary(pages: list[Page]) -> None:
    summary = DOCS / "SUMMARY.md"
    listed = {(DOCS / target).resolve() for _, target in Page(summary).links()}
    for page in pages:
        if page.path != summary and page.path not in listed:
            fault(page.path, 1, "SUMMARY.md does not list this page")


def check_blocks(page: Page) -> None:
    # Reports have the commands of a run that was made once.
    if page.path.parent.name == "benchmarks" and page.path.name != "README.md":
        return
    for line, language, _, after in page.blocks:
        if not language:
            fault(page.path, line, "a block of code without a language (text, if it has none)")
        elif language in ("sh", "bash", "console"):
            if after != RUN and not after.startswith(NOT_RUN):
                fault(page.path, line, f"below the block: {RUN} or {NOT_RUN}: why.*")
        elif language.startswith("rust"):
            check_compiled(page, line, language)


def check_compiled(page: Page, line: int, language: str) -> None:
    name = page.path.relative_to(ROOT).as_posix()
    if name not in (ROOT / "examples/small/src/lib.rs").read_text(encoding="utf-8"):
        fault(page.path, line, "examples/small/src/lib.rs does not test this page")
    if "ignore" in language:
        fault(page.path, line, "a block that is not compiled")


def without_names(text: str) -> str:
    """The text of an error, without the names of what is put in."""
    return re.sub(r"\{[^{}]*\}", "{}", text)


def check_quotes(page: Page) -> None:
    sources = []
    for path in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        # Strings that go on in the next line.
        text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
        sources.append(without_names(text.replace('\\"', '"')))
    source = "\n".join(sources)
    quotes = 0
    for number, line in page.prose:
        if quote := QUOTE.fullmatch(line):
            quotes += 1
            if without_names(quote[2].strip()) not in source:
                fault(page.path, number, f"no source has this text: {quote[2]}")
    if quotes < 50:
        fault(page.path, 1, f"only {quotes} texts of errors were found: are they lines of their own?")


class Html(html.parser.HTMLParser):
    """The links and anchors of a page that mdBook has made."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif (tag, name) in (("a", "href"), ("img", "src")) and value:
                self.links.append(value)


def check_html(folder: Path) -> None:
    pages = {path: Html(path) for path in folder.resolve().rglob("*.html")}
    if not pages:
        faults.append(f"no pages in {folder}")
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = urllib.parse.unquote(link).partition("#")
            if re.match(r"[a-z]+:|//", name) or path.name in ("404.html", "print.html", "toc.html"):
                continue
            target = (path.parent / name).resolve() if name else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                faults.append(f"{path.name}: {link} is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                faults.append(f"{path.name}: {link} leads to no heading")


def main(arguments: list[str]) -> int:
    match arguments:
        case []:
            pages = [Page(path) for path in sorted(DOCS.rglob("*.md"))]
            check_summary(pages)
            for page in pages:
                check_links(page)
                check_blocks(page)
            for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
                check_links(Page(ROOT / name))
            check_quotes(Page(DOCS / "troubleshooting.md"))
        case ["--commands", page]:
            for _, language, text, after in Page(Path(page).resolve()).blocks:
                if language == "sh" and after == RUN:
                    print(text, end="")
        case ["--html", folder]:
            check_html(Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for line in faults:
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
