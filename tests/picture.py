"""A picture of a page in headless Chromium: `python -m tests.picture PAGE OUT.png [--width W] [--height H]`.

PAGE is a file or a URL. Needs the packages of `make test-browser`.
"""

import argparse
from pathlib import Path

from tests.browser import chromium


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1040)
    parser.add_argument("--height", type=int, default=900)
    options = parser.parse_args()
    url = options.page
    if "://" not in url:
        url = Path(url).resolve().as_uri()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": options.width, "height": options.height})
        page.goto(url)
        page.screenshot(path=options.out)


if __name__ == "__main__":
    main()
