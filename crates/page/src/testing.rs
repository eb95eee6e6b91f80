//! Reads a page as a browser does, for tests.

use std::cell::RefCell;

use html5ever::tokenizer::{
    BufferQueue, Tag, TagKind, Token, TokenSink, TokenSinkResult, Tokenizer, TokenizerOpts,
    states::{RawKind, State},
};
use vitivirt_runtime::server::HttpResponse;

#[derive(Debug, Default)]
pub struct HtmlDocument {
    pub elements: Vec<Element>,
    /// The text, without the style.
    pub text: String,
    /// What a browser would report as malformed.
    pub errors: Vec<String>,
    open: Vec<String>,
}

#[derive(Debug)]
pub struct Element {
    pub name: String,
    pub attributes: Vec<(String, String)>,
}

impl HtmlDocument {
    /// The targets of all links.
    pub fn links(&self) -> Vec<&str> {
        let links = self.elements.iter().filter(|element| element.name == "a").flat_map(|link| &link.attributes);
        links.filter(|(name, _)| name == "href").map(|(_, target)| target.as_str()).collect()
    }
}

#[derive(Default)]
struct Sink(RefCell<HtmlDocument>);

/// Elements without an end tag.
const VOID: [&str; 5] = ["meta", "link", "input", "br", "hr"];

impl TokenSink for Sink {
    type Handle = ();

    fn process_token(&self, token: Token, _: u64) -> TokenSinkResult<()> {
        let mut document = self.0.borrow_mut();
        match token {
            Token::TagToken(Tag { kind: TagKind::StartTag, name, attrs, .. }) => {
                let attributes = attrs.iter().map(|have| (have.name.local.to_string(), have.value.to_string()));
                document.elements.push(Element { name: name.to_string(), attributes: attributes.collect() });
                if !VOID.contains(&&*name) {
                    document.open.push(name.to_string());
                }
                match &*name {
                    "style" => return TokenSinkResult::RawData(RawKind::Rawtext),
                    "title" => return TokenSinkResult::RawData(RawKind::Rcdata),
                    _ => {}
                }
            }
            Token::TagToken(Tag { kind: TagKind::EndTag, name, .. }) => {
                let open = document.open.pop();
                if open.as_deref() != Some(&*name) {
                    document.errors.push(format!("unexpected </{name}>"));
                }
            }
            Token::CharacterTokens(text) if document.open.last().is_some_and(|open| open != "style") => {
                document.text.push_str(&text);
            }
            Token::ParseError(error) => document.errors.push(error.into_owned()),
            _ => {}
        }
        TokenSinkResult::Continue
    }
}

pub fn parse(html: &str) -> HtmlDocument {
    let options = TokenizerOpts { initial_state: Some(State::Data), ..TokenizerOpts::default() };
    let tokenizer = Tokenizer::new(Sink::default(), options);
    let input = BufferQueue::default();
    input.push_back(html.into());
    let _ = tokenizer.feed(&input);
    tokenizer.end();
    let mut document = tokenizer.sink.0.into_inner();
    let open = std::mem::take(&mut document.open);
    document.errors.extend(open.into_iter().map(|name| format!("<{name}> is not closed")));
    document
}

/// The body of a response.
pub fn text(response: HttpResponse) -> String {
    use http_body_util::BodyExt;
    // The body is in memory, so the future is ready.
    let body = std::pin::pin!(response.into_body().collect());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match body.poll(&mut context) {
        std::task::Poll::Ready(Ok(body)) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        std::task::Poll::Ready(Err(never)) => match never {},
        std::task::Poll::Pending => String::new(),
    }
}

pub fn document(response: HttpResponse) -> HtmlDocument {
    parse(&text(response))
}
