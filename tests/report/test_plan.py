"""The page of a plan."""

from collab_compress.analysis import Plan, Trial
from collab_compress.report import plan_report, render_page

TRIALS = (
    Trial("dk", 12, 0.5, 0.02, 0.95, 0.6, 0.9, knee=True),
    Trial("dk", 6, 0.25, 0.3, 0.92, 0.4, None),
    Trial("dff", 16, 0.5, 0.1, 0.8, 0.5, 0.7),
)
PLAN = Plan(TRIALS, 9, {"dv": "heads are <mixed>"})


def test_it_holds_every_trial():
    result = plan_report(PLAN, "tiny", "texts.txt")
    rows = result.table("plan", "trials")
    assert [(row["part"], row["width"], row["time of the model, of dense"]) for row in rows] == [
        ("dk", 12, 0.9),
        ("dk", 6, None),
        ("dff", 16, 0.7),
    ]
    drift, cost = result.sections[0].pictures
    of_dk, of_dff = (panel.curves for panel in drift.panels)
    assert (of_dk[0].x, of_dk[0].y) == ((6, 12, 24), (30, 2, 0))  # and 0 at the dense width
    assert [(curve.name, curve.x) for curve in of_dk[1:]] == [("knee", (12, 12))]
    assert len(of_dff) == 1
    assert [(curve.name, curve.y) for curve in cost.panels[0].curves] == [
        ("operations", (0.4, 0.6)),
        ("parameters", (0.92, 0.95)),
        ("time", (None, 0.9)),
    ]


def test_the_page_names_the_knee_and_what_was_left_out():
    page = render_page(plan_report(PLAN, "<tiny>", "texts.txt"))
    assert "Widths of &lt;tiny&gt;" in page
    assert "is at 12." in page
    assert "heads are &lt;mixed&gt;" in page
    assert page.count("<svg") == 4


def test_a_plan_without_trials_is_a_page_of_reasons():
    page = render_page(plan_report(Plan((), 9, {"dk": "already converted"}), "tiny", "texts.txt"))
    assert "already converted" in page
    assert "<svg" not in page
