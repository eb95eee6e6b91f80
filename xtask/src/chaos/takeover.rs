//! `cargo xtask chaos takeover`: every case of the take-over, and the table of docs/takeover.md.

use std::fs;

use anyhow::{Context, Result};

use super::long_test;
use crate::programs;

const PAGE: &str = "docs/takeover.md";
const BEGIN: &str = "<!-- The table is written by `cargo xtask chaos takeover`. -->\n";
const HEADER: &str = "| installation | writes | restarts | CA | writes back | restarts back | CA back |\n\
                      |---|---|---|---|---|---|---|\n";

pub(super) fn run() -> Result<()> {
    let rows = programs::target_dir()?.join("takeover.md");
    let variable = ("TAKEOVER_REPORT", rows.display().to_string());
    long_test("virt-operator", "an_installation_of_upstream_is_taken_over", variable)?;
    let rows = fs::read_to_string(&rows).with_context(|| format!("reading {}", rows.display()))?;
    let page = programs::root().join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| format!("reading {PAGE}"))?;
    fs::write(&page, with_table(&text, &rows)?).with_context(|| format!("writing {PAGE}"))?;
    println!("wrote {PAGE}");
    Ok(())
}

/// The page with new rows in its table.
fn with_table(page: &str, rows: &str) -> Result<String> {
    let (before, after) = page.split_once(BEGIN).context("the page has no place for the table")?;
    let rest = after.split_once("\n\n").map_or("", |(_, rest)| rest);
    let rest = if rest.is_empty() { String::new() } else { format!("\n{rest}") };
    Ok(format!("{before}{BEGIN}{HEADER}{rows}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_table_is_replaced() {
        let page = format!("text\n\n{BEGIN}| old |\n| older |\n\n## More\n");
        let expected = format!("text\n\n{BEGIN}{HEADER}| new |\n\n## More\n");
        let replaced = with_table(&page, "| new |\n").unwrap();
        assert_eq!(replaced, expected);
        assert_eq!(with_table(&replaced, "| new |\n").unwrap(), expected);
    }

    #[test]
    fn the_page_has_a_place_for_the_table() {
        let page = fs::read_to_string(programs::root().join(PAGE)).unwrap();
        assert!(page.contains(BEGIN));
    }
}
