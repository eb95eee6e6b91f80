//! The shell commands in the pages of the documentation, so that tests can run them.
//!
//! A comment directly before a block says how it is run:
//!
//! - `<!-- not run: reason -->`: it cannot run on the lab;
//! - `<!-- set-up: commands -->`: these commands are run before it;
//! - `<!-- with Helm -->`: it is run on the lab of the Helm charts, on which nothing is installed with kubectl;
//! - `<!-- last -->`: it is run after all other blocks of all pages.

/// The languages of blocks that contain shell commands.
const SHELLS: [&str; 5] = ["sh", "shell", "bash", "console", "zsh"];

/// A fenced block of shell commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShellBlock {
    /// The number of the first line of the commands in its page.
    pub line: usize,
    pub commands: String,
    pub run: BlockRun,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockRun {
    Yes { set_up: Option<String> },
    Helm,
    Last,
    No { reason: String },
}

/// The blocks of a Markdown page, in order.
pub fn shell_blocks(page: &str) -> Vec<ShellBlock> {
    let mut blocks = Vec::new();
    let mut before: Option<&str> = None;
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.trim().strip_prefix("```").is_some_and(|language| SHELLS.contains(&language)) {
            let indent = line.len() - line.trim_start().len();
            let mut commands = String::new();
            for (_, command) in lines.by_ref().take_while(|(_, line)| line.trim() != "```") {
                commands.push_str(command.get(indent..).unwrap_or_default());
                commands.push('\n');
            }
            blocks.push(ShellBlock { line: number + 2, commands, run: block_run(before) });
        }
        before = Some(line);
    }
    blocks
}

fn block_run(before: Option<&str>) -> BlockRun {
    let comment = before.and_then(|line| line.trim().strip_prefix("<!-- ")?.strip_suffix(" -->"));
    let text = |prefix: &str| comment.and_then(|comment| comment.strip_prefix(prefix)).map(ToOwned::to_owned);
    match (comment, text("not run: ")) {
        (_, Some(reason)) => BlockRun::No { reason },
        (Some("with Helm"), _) => BlockRun::Helm,
        (Some("last"), _) => BlockRun::Last,
        _ => BlockRun::Yes { set_up: text("set-up: ") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_lines_and_comments() {
        let page = "# A\n```sh\none\ntwo\n```\n```yaml\nno: 1\n```\n<!-- not run: no cluster -->\n```sh\nthree\n```\n1. x\n\n   \
                    <!-- set-up: kubectl create namespace shop -->\n   ```sh\n   four\n     five\n   ```\n<!-- last -->\n```sh\nsix\n```\n\
                    <!-- with Helm -->\n```console\nseven\n```\n```bash\neight\n```\n```text\nno\n```\n";
        let yes = |set_up: Option<&str>| BlockRun::Yes { set_up: set_up.map(ToOwned::to_owned) };
        let expected = [
            (3, "one\ntwo\n", yes(None)),
            (11, "three\n", BlockRun::No { reason: "no cluster".to_owned() }),
            (17, "four\n  five\n", yes(Some("kubectl create namespace shop"))),
            (22, "six\n", BlockRun::Last),
            (26, "seven\n", BlockRun::Helm),
            (29, "eight\n", yes(None)),
        ];
        let expected = expected.map(|(line, commands, run)| ShellBlock { line, commands: commands.to_owned(), run });
        assert_eq!(shell_blocks(page), expected);
    }
}
