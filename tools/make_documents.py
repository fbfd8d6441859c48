"""The PDF files of crates/plimsoll-document/tests/fixtures: python3 tools/make_documents.py (needs fpdf2 and Chromium)."""

import pathlib
import subprocess
import tempfile

from fpdf import FPDF

FOLDER = pathlib.Path(__file__).parent.parent / "crates/plimsoll-document/tests/fixtures"
PAGE = """<html><body><h1>Quarterly report</h1>
<p>The tide is the rise and fall of the sea. It follows the <b>moon</b> – “quoted” text, naïve café, 12 €.</p>
<table border=1><tr><th>City</th><th>Rain (mm)</th></tr><tr><td>Oslo</td><td>42</td></tr><tr><td>Rome</td><td>7</td></tr></table>
<p style="page-break-before:always">Second page: Привет, мир. Ελληνικά. 日本語</p></body></html>"""


def written(name, text=None, **keys):
    pdf = FPDF()
    if keys:
        pdf.set_encryption(**keys)
    pdf.add_page()
    if text:
        pdf.set_font("Helvetica", size=12)
        pdf.cell(text=text)
    pdf.output(FOLDER / name)


with tempfile.TemporaryDirectory() as folder:
    page = pathlib.Path(folder) / "page.html"
    page.write_text(PAGE)
    printed = f"--print-to-pdf={FOLDER / 'two-pages.pdf'}"
    subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", printed, page], check=True)
written("empty.pdf")
written("locked.pdf", "secret", owner_password="o", user_password="u")
written("owner.pdf", "Owner only.", owner_password="o")
