"""The account counts what it names, prints three names of a kind, and adds up."""

from trainer.base.account import Account, Entry, Heading


def test_a_kind_is_counted_once_and_three_of_its_names_are_printed() -> None:
    account = Account([Entry(Heading.USED, "", count=1200, noun="photo"), Entry(Heading.USED, "", noun="mask")])
    account.add(Heading.LEFT_OUT, "hidden", ["a/.git/"], count=40)
    account.add(Heading.LEFT_OUT, "a video", (f"{number}.mp4" for number in range(5)), remedy="cut pictures out of it")
    account.add(Heading.LEFT_OUT, "hidden", ["a/.b"])
    account.add(Heading.NOTE, "captions of a: none")
    account.add(Heading.WARNING, "named like a mask", ["a/m\n.png"], noun="photo")
    account.add(Heading.ASSUMED, "a published config")
    assert account.lines() == [
        "found: 1,200 photos, 46 left out",
        "captions of a: none",
        "assumed: a published config",
        "warning: 1 photo: named like a mask (a/m\\n.png)",
        "left out: 46 files",
        "  41 files: hidden (a/.git/, a/.b)",
        "  5 files: a video (0.mp4, 1.mp4, 2.mp4 and 2 more); cut pictures out of it",
    ]


def test_a_sum_has_the_items_of_both_and_leaves_them_as_they_were() -> None:
    one, two = (Account([Entry(Heading.LEFT_OUT, "hidden", [name], 1)]) for name in "ab")
    (both,) = one + two
    assert (both.names, both.count) == (["a", "b"], 2) and [entry.names for entry in (*one, *two)] == [["a"], ["b"]]
    two.add(Heading.LEFT_OUT, "in another split", ["split test"], count=7, noun="row")
    assert two.lines()[0] == "left out: 7 rows, 1 file"
