"""The measures of the other tests here find what they look for."""

PAGE = """<!doctype html><link rel="icon" href="data:,"><title>x</title>
<style>body { background: #fff; color: #000 }</style>
<p>plain</p><p style="color: #bbb">pale</p><div style="width: 500px">wide</div>
<div style="overflow: auto"><div style="width: 900px">inside</div></div>
<img src="missing.png"><script>nothing.there</script>"""


def test_what_is_wrong_with_a_page_is_noticed(open_page, serve, tmp_path):
    (tmp_path / "page.html").write_text(PAGE)
    address = f"{serve(tmp_path)}/page.html"
    opened = open_page(address, width=390)
    assert opened.requests == [address, address.replace("page.html", "missing.png")]
    assert len(opened.complaints) == 2  # the image, and the script
    assert [text.split()[1:] for text in opened.pale()] == [["P", "pale"]]
    assert opened.overflowing() == ["DIV.null ends at 508", "the page scrolls sideways"]
    assert open_page(tmp_path / "page.html", width=600, scheme="dark").overflowing() == []
