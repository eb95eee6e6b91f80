//! Parts of pages: states, trees, counts.

use maud::{Markup, html};
use vitivirt_api::{
    docs_url, troubleshooting_url,
    view::{StepState, TreeStep},
};

/// A state as a symbol and a text, so that it does not depend on colors.
pub fn badge(state: StepState, text: &str) -> Markup {
    html! { span class={ "badge " (state.as_str()) } { (state.symbol()) " " (text) } }
}

/// A reason, with a link to the page that explains it.
pub fn reason(reason: &str) -> Markup {
    html! { a href=(troubleshooting_url(reason)) rel="noreferrer noopener" { (reason) } }
}

/// A message with links to the pages of the documentation that it names. Other addresses stay text: a guest or another client
/// may have written them.
pub fn message(text: &str) -> Markup {
    let docs = docs_url("");
    html! {
        @for (number, part) in text.split(&docs).enumerate() {
            @if number == 0 {
                (part)
            } @else {
                @let (page, rest) = part.split_at(end_of_page(part));
                a href={ (docs) (page) } rel="noreferrer noopener" { (docs) (page) }
                (rest)
            }
        }
    }
}

/// The length of the path and anchor at the start of a text.
fn end_of_page(text: &str) -> usize {
    let end = text.find(|letter: char| !letter.is_ascii_alphanumeric() && !"-_./#".contains(letter));
    text.get(..end.unwrap_or(text.len())).unwrap_or_default().trim_end_matches('.').len()
}

/// An object with the objects that it consists of.
pub fn tree(step: &TreeStep) -> Markup {
    html! { ul class="tree" { (branch(step)) } }
}

fn branch(step: &TreeStep) -> Markup {
    html! {
        li {
            span class={ "badge " (step.state.as_str()) } {
                (step.state.symbol()) " " (step.kind)
                @if !step.name.is_empty() { " " (step.name) }
            }
            " " span { (step.summary) }
            @if !step.facts.is_empty() {
                dl { @for fact in &step.facts { dt { (fact.label) } dd { (fact.value) } } }
            }
            @if !step.steps.is_empty() { ul { @for part in &step.steps { (branch(part)) } } }
        }
    }
}

/// Numbers side by side.
pub fn cards<'a>(cards: impl IntoIterator<Item = (&'a str, Markup)>) -> Markup {
    html! { ul class="cards" { @for (label, value) in cards { li { b { (value) } (label) } } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_the_documentation_become_links() {
        let docs = docs_url("");
        let url = |page: &str| format!("{docs}{page}");
        let link = |page: &str| format!("<a href=\"{0}\" rel=\"noreferrer noopener\">{0}</a>", url(page));
        for (text, expected) in [
            (format!("boot it; see {}", url("first-machine.md")), format!("boot it; see {}", link("first-machine.md"))),
            (format!("({}).", url("faq.md#a-b")), format!("({}).", link("faq.md#a-b"))),
            (format!("{}.", url("faq.md")), format!("{}.", link("faq.md"))),
            ("https://x.example/<b>".to_owned(), "https://x.example/&lt;b&gt;".to_owned()),
            (url("\"><script>"), format!("{}&quot;&gt;&lt;script&gt;", link(""))),
        ] {
            assert_eq!(message(&text).into_string(), expected);
        }
    }
}
