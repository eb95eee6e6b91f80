//! Parts of pages: states, trees, counts.

use maud::{Markup, html};
use vitivirt_api::{
    troubleshooting_url,
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
