"""What a report holds, read back."""

import re
from html.parser import HTMLParser

from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.summary import findings


class Page(HTMLParser):
    """Collects elements, their attributes, the cells of each table and all text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text, self.tables, self.inside = [], "", [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.inside = tag

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text += data
            if self.tables and self.tables[-1] and self.tables[-1][-1]:
                self.tables[-1][-1][-1] += f" {data.strip()}"

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def told_of(results, pattern):
    """The finding in which a pattern is found."""
    return next(sentence for sentence in findings(Results(results)) if re.search(pattern, sentence))


def markdown_tables(text):
    """Cells of each table; a pipe after a backslash is text."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]


def latex_rows(text):
    """Rows of the tabular as lists of cells, spanning cells counted as often as they span; checks the braces."""
    bare = re.sub(r"\\[\\{}&%$#_]", lambda match: "\n" if match[0] == r"\\" else "", text)
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        assert depth >= 0
    assert depth == 0 and bare.count("$") % 2 == 0
    body = bare[bare.index("\\toprule") : bare.index("\\bottomrule")]
    body = re.sub(r"\\(toprule|midrule|cmidrule\(lr\)\{[\d-]+\})", "", body)
    rows = [line.split("&") for line in body.splitlines() if "&" in line]
    spans = [[re.search(r"\\multicolumn\{(\d+)\}", cell) for cell in row] for row in rows]
    return [sum(int(span[1]) if span else 1 for span in row) for row in spans]


def lowest_psnr(table):
    place = [column.title for column in table.columns].index("Lowest PSNR, dB") - table.heads
    return [line.entries[place].text for line in table.lines]
