"""The documentation opened from a folder, without a server: it is searched, and asks nobody."""

import pytest


@pytest.mark.parametrize("page", ["index.html", "learn/02-heads.html"])
def test_search_works_from_a_folder(documentation, browser, page):
    context = browser.new_context()
    opened = context.new_page()
    asked, faults = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto((documentation / page).as_uri())
    search = opened.locator("input.md-search__input")
    search.fill("softmax")
    for _ in range(200):  # the page listens for keys once its scripts have run, whenever that is
        search.press("End")
        if opened.locator(".md-search-result__item").count():
            break
        opened.wait_for_timeout(300)
    assert "01-attention.html" in opened.locator(".md-search-result__list").inner_html()
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    assert not faults
    context.close()
