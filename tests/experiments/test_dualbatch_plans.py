"""Tables 2 and 6: what the equations give, read and judged."""

import made
import pytest
from made_dualbatch import World, results, rows


def checked(table, position=0, **world):
    return made.check_row(f"dualbatch/{table}", position, results(table, World(**world)))


class TestTables2And6:
    @staticmethod
    def changed(*names, by=7, first=None):
        def edit(metrics, config):
            for row in metrics["rows"][:first]:
                for name in names:
                    if row.get(name) is not None:
                        row[name] += by

        return {"solve": edit}

    @pytest.mark.parametrize(
        ("table", "told"),
        [("table2", "B_S: 6 of 8 (not 84 for 83)"), ("table6", "B_S: 7 of 8 (not 131 for 130)")],
    )
    def test_equations(self, table, told):
        row = checked(table, edit=self.changed("small_batch", by=1, first=2))
        assert row["holds"] == "NO" and told in row["evidence"]
        assert checked(table)["holds"] == "yes"

    def test_a_factor_is_compared_as_printed(self):
        row = checked("table2", edit=self.changed("factor", by=2e-3))
        assert row["holds"] == "NO" and "d_S/d_L: 0 of 6" in row["evidence"]
        assert checked("table2", edit=self.changed("factor", by=1e-5))["holds"] == "yes"

    def test_how_many_values(self):
        # 8 rows of B_S and d_S, d_L and the factor where there is a large-batch worker.
        for told in ("B_S: 8 of 8", "d_S: 8 of 8", "d_L: 6 of 6", "d_S/d_L: 6 of 6"):
            assert told in checked("table2")["evidence"]
        # 5 resolutions: B_S and d_S but for n_S = 0, d_L but for n_S = 4.
        for told in ("CIFAR, d_L: 8 of 8", "ImageNet, B_S: 12 of 12"):
            assert told in checked("table6")["evidence"]

    def test_raw_plan(self):
        def other(metrics, config):
            metrics["frameworks"]["TensorFlow"]["table2"][4] = 39

        row = checked("table2", 1, edit={"published": other})
        assert row["holds"] == "NO" and "39 for 38" in row["evidence"]
        assert checked("table2", 1)["holds"] == "yes"

    def test_ours_stand_beside_the_papers(self):
        for table, count in (("table2", 8), ("table6", 10)):
            found = rows(table)
            assert len(found) == count
            for row in found:
                for name in ("B_S", "d_S", "d_L", "d_S, d_L"):
                    if name in row:
                        assert row[name] == row[f"{name}, paper"]
        assert rows("table6")[1]["B_S"] == "130, 102"
        wrong = rows("table2", World(edit=self.changed("small_batch", by=1, first=1)))
        assert (wrong[0]["B_S"], wrong[0]["B_S, paper"]) == (84, 83)
