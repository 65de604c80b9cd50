"""Hooks of the site: pages that are not there leave the navigation, and links out of docs/ become plain text."""

import re
from pathlib import Path

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config):
    """Leave missing pages out of the navigation, and add the how-to pages that it does not name."""
    docs = Path(config["docs_dir"])
    named = re.findall(r"[\w./-]+\.md", str(config["nav"]))
    others = sorted(f"how-to/{path.name}" for path in (docs / "how-to").glob("*.md"))
    config["nav"] = _existing(config["nav"], docs, [name for name in others if name not in named])
    return config


def _existing(nav: list, docs: Path, others: list[str]) -> list:
    kept = []
    for entry in nav:
        ((title, inside),) = entry.items() if isinstance(entry, dict) else [("", entry)]
        if isinstance(inside, list):
            kept.append({title: [*_existing(inside, docs, []), *(others if title == "How to" else [])]})
        elif (docs / inside).is_file():
            kept.append(entry)
    return kept


def on_page_markdown(markdown, *, page, config, files):
    """Take links to files outside docs/ out of the text."""
    here = Path(page.file.abs_src_path)
    docs = Path(config["docs_dir"]).resolve()

    def checked(match: re.Match) -> str:
        text, target = match.groups()
        path = target.partition("#")[0]
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        # Also what is inside and is no page: folders, and files that are left out of the site.
        leads = (here.parent / path).resolve()
        return match[0] if leads.is_relative_to(docs) and leads.suffix in (".md", ".png", ".svg") else text

    # Code blocks hold no links.
    parts = re.split(r"(```.*?```)", markdown, flags=re.S)
    return "".join(part if part.startswith("```") else LINK.sub(checked, part) for part in parts)


def on_post_page(output, *, page, config):
    """Take the script with which search works in files from these pages, not from the network."""
    return _at_home(output, "../" * page.url.count("/"))


def on_post_template(output, *, template_name, config):
    """The same for pages that come from no Markdown."""
    return _at_home(output, "") if template_name.endswith(".html") else output


def _at_home(output: str, up: str) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/iframe-worker.js")
