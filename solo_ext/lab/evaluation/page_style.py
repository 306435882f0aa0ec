"""The style that reports share: light, dark and printed, without a file beside the page."""

from __future__ import annotations

_LIGHT = """color-scheme: light; --page: #fff; --ink: #1c2126; --soft: #59636e; --rule: #d5dade;
  --plugin: #0072b2; --host: #d98c00; --baseline: #9aa3ab; --wrong: #b3261e"""
_DARK = """color-scheme: dark; --page: #15181c; --ink: #e4e7ea; --soft: #9aa4ae; --rule: #353c44;
  --plugin: #4fa8dc; --host: #e0a030; --baseline: #717b85; --wrong: #ff8a80"""
PAGE_STYLE = f"""
:root {{ {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  overflow-wrap: anywhere }}
h1 {{ margin: 0 0 .75rem; font-size: 1.7rem; line-height: 1.25 }}
h2 {{ margin: 2.5rem 0 .5rem; padding-top: .9rem; border-top: 1px solid var(--rule);
  font-size: 1.15rem }}
p, ul {{ max-width: 46rem; margin: .5rem 0 }}
.soft {{ color: var(--soft); font-size: .875rem }}
.wide {{ overflow-x: auto; margin: .75rem 0 }}
table {{ border-collapse: collapse; font-size: .925rem; overflow-wrap: normal }}
th, td {{ padding: .4rem .75rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule) }}
th:first-child {{ padding-left: 0 }}
thead th {{ vertical-align: bottom; color: var(--soft); font-weight: 600; line-height: 1.3;
  border-bottom-color: var(--soft) }}
tbody th {{ font-weight: 500 }}
.num {{ text-align: right }}
td.num {{ white-space: nowrap }}
.facts th {{ color: var(--soft); font-weight: 400; white-space: nowrap }}
figure {{ margin: 0; break-inside: avoid }}
figcaption {{ margin-bottom: .3rem; font-weight: 600 }}
"""


def page(title: str, style: str, body: str, *, pictures: bool = False) -> str:
    """A whole HTML page that loads nothing from anywhere.

    Args:
        title: escaped.
        style: CSS.
        body: HTML.
        pictures: whether it embeds some.
    """
    images = "; img-src data:" if pictures else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'{images}\">\n"
        f"<title>{title}</title>\n<style>{style}\n</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )
