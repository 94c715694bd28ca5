import unittest

from textkit.template import TemplateError, render


def line_of(template, values):
    try:
        render(template, values)
    except TemplateError as error:
        return error.line
    return 0


class RenderTest(unittest.TestCase):
    def test_values(self):
        self.assertEqual(render("Hi {{ name }}, {{n}} new.", {"name": "Ada", "n": 0}), "Hi Ada, 0 new.")

    def test_dotted(self):
        self.assertEqual(render("{{user.name}}", {"user": {"name": "Ada"}}), "Ada")

    def test_filters(self):
        self.assertEqual(render("{{name|upper|first:2}}", {"name": "ada"}), "AD")
        self.assertEqual(render("{{parts|join: + }}", {"parts": [1, 2]}), "1 + 2")
        self.assertEqual(render("{{parts|join}}", {"parts": [1, 2]}), "1, 2")

    def test_default(self):
        self.assertEqual(render("{{name|default:nobody}}", {}), "nobody")
        self.assertEqual(render("{{n|default:5}}", {"n": 0}), "0")
        self.assertEqual(render("{{name|default:nobody}}", {"name": ""}), "")

    def test_unknown(self):
        with self.assertRaises(TemplateError):
            render("{{name}}", {})
        with self.assertRaises(TemplateError):
            render("{{name|shout}}", {"name": "a"})

    def test_line(self):
        self.assertEqual(line_of("a\nb\n{{name}}", {}), 3)
        self.assertEqual(line_of("{{name}}", {}), 1)


class SectionTest(unittest.TestCase):
    def test_list(self):
        values = {"items": [{"n": 1}, {"n": 2}]}
        self.assertEqual(render("{{#items}}<{{n}}>{{/items}}.", values), "<1><2>.")

    def test_plain_items(self):
        self.assertEqual(render("{{#xs}}{{item}} {{/xs}}", {"xs": [1, 2]}), "1 2 ")

    def test_outer_values(self):
        values = {"xs": [{"n": 1}], "unit": "kg"}
        self.assertEqual(render("{{#xs}}{{n}}{{unit}}{{/xs}}", values), "1kg")

    def test_inner_values_first(self):
        values = {"xs": [{"n": 1}, {}], "n": 9}
        self.assertEqual(render("{{#xs}}{{n}}{{/xs}}{{n}}", values), "199")

    def test_conditions(self):
        self.assertEqual(render("{{#ok}}yes{{/ok}}", {"ok": True}), "yes")
        self.assertEqual(render("{{#ok}}yes{{/ok}}", {"ok": False}), "")

    def test_empty(self):
        self.assertEqual(render("[{{#xs}}{{n}}{{/xs}}]", {"xs": []}), "[]")

    def test_nested(self):
        values = {"rows": [{"cells": [1, 2]}, {"cells": [3]}]}
        self.assertEqual(render("{{#rows}}{{#cells}}{{item}},{{/cells}};{{/rows}}", values), "1,2,;3,;")

    def test_not_closed(self):
        with self.assertRaises(TemplateError):
            render("{{#xs}}a", {"xs": [1]})
        with self.assertRaises(TemplateError):
            render("a{{/xs}}", {"xs": [1]})


if __name__ == "__main__":
    unittest.main()
