//! A Chromium without a window, for tests of pages. It runs in the network namespace of the lab, so it reaches nothing
//! else. The test controls it with the DevTools protocol over two pipes.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};

use crate::Lab;

const PROGRAMS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
const TIMEOUT: Duration = Duration::from_secs(60);
/// Nothing but the pages of the test. The sandbox needs namespaces, which the lab's own namespaces do not allow.
const ARGUMENTS: [&str; 14] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-proxy-server",
    "--password-store=basic",
    "--remote-debugging-pipe",
];

/// The installed Chromium, if there is one.
pub fn find() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    PROGRAMS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|file| file.exists())
}

pub struct Browser {
    _child: Child,
    commands: pipe::Sender,
    messages: pipe::Receiver,
    unread: Vec<u8>,
    events: VecDeque<Value>,
    calls: u64,
}

/// How a page is shown.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub width: u32,
    pub height: u32,
    pub dark: bool,
}

/// What a page did and showed.
#[derive(Debug)]
pub struct Visit {
    pub title: String,
    pub text: String,
    /// The width of the content. If it is larger than the view, the page scrolls horizontally.
    pub content_width: u64,
    pub background: String,
    /// Messages of the console, errors, and dialogs that a script opened.
    pub console: Vec<String>,
    /// The URLs of all requests.
    pub requests: Vec<String>,
    /// A PNG.
    pub picture: Vec<u8>,
}

impl Visit {
    fn check(&self, origin: &str, width: u32, title: &str) -> Result<()> {
        ensure!(self.console.is_empty(), "the console has messages: {:?}", self.console);
        ensure!(self.requests.iter().all(|url| url.starts_with(origin)), "external requests: {:?}", self.requests);
        ensure!(self.content_width <= u64::from(width), "the page is {} px wide", self.content_width);
        ensure!(self.title.ends_with(title), "{:?}", self.title);
        Ok(())
    }
}

impl Browser {
    /// Starts the installed browser with its files in the folder of a lab. `None` if there is no Chromium on this
    /// machine.
    pub async fn start_if_installed(lab: &Lab) -> Result<Option<Self>> {
        let Some(program) = find() else {
            eprintln!("the browser part of this test is skipped: no Chromium in PATH; install the package chromium");
            return Ok(None);
        };
        let folder = lab.folder().join("chromium");
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Self::start(&program, &folder).await.map(Some)
    }

    /// `folder` must exist and be empty.
    pub async fn start(program: &Path, folder: &Path) -> Result<Self> {
        let (commands, messages) = (folder.join("commands"), folder.join("messages"));
        for pipe in [&commands, &messages] {
            mkfifo(pipe, Mode::S_IRUSR | Mode::S_IWUSR).with_context(|| format!("creating {}", pipe.display()))?;
        }
        let open = || pipe::OpenOptions::new().read_write(true).clone();
        let (sender, receiver) = (open().open_sender(&commands)?, open().open_receiver(&messages)?);
        let child = Command::new("sh")
            // Chromium reads file descriptor 3 and writes file descriptor 4.
            .args(["-c", "exec \"$0\" \"$@\" 3<\"$COMMANDS\" 4>\"$MESSAGES\""])
            .arg(program)
            .args(ARGUMENTS)
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .env("COMMANDS", &commands)
            .env("MESSAGES", &messages)
            .env("HOME", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self {
            _child: child,
            commands: sender,
            messages: receiver,
            unread: Vec::new(),
            events: VecDeque::new(),
            calls: 0,
        })
    }

    /// Shows pages at several widths, dark and light. Fails if the console has a message, if a page requests something
    /// from another origin, is wider than the window or has another title, or if dark and light look the same. Returns
    /// the first visit of each page.
    pub async fn check_pages(&mut self, origin: &str, paths: &[&str], title: &str) -> Result<Vec<Visit>> {
        let (mut first, mut backgrounds) = (Vec::new(), Vec::new());
        for (width, dark) in [(1100, false), (1100, true), (700, false), (400, false), (400, true)] {
            for path in paths {
                let visit = self.visit(&format!("{origin}{path}"), View { width, height: 800, dark }).await?;
                visit.check(origin, width, title).with_context(|| format!("{path} at {width} px, dark: {dark}"))?;
                backgrounds.push((dark, visit.background.clone()));
                if first.len() < paths.len() {
                    first.push(visit);
                }
            }
        }
        let of = |dark: bool| backgrounds.iter().find(|(is_dark, _)| *is_dark == dark).map(|(_, color)| color);
        ensure!(of(true) != of(false), "dark and light have the same background: {backgrounds:?}");
        Ok(first)
    }

    pub async fn visit(&mut self, url: &str, view: View) -> Result<Visit> {
        timeout(TIMEOUT, self.visit_page(url, view)).await.with_context(|| format!("{url} was not shown in time"))?
    }

    async fn visit_page(&mut self, url: &str, view: View) -> Result<Visit> {
        let target = self.call(None, "Target.createTarget", json!({"url": "about:blank"})).await?;
        let target = string_at(&target, "/targetId");
        let attach = json!({"targetId": target, "flatten": true});
        let session = string_at(&self.call(None, "Target.attachToTarget", attach).await?, "/sessionId");
        let page = Some(session.as_str());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(page, &format!("{domain}.enable"), json!({})).await?;
        }
        let size = json!({"width": view.width, "height": view.height, "deviceScaleFactor": 1, "mobile": false});
        self.call(page, "Emulation.setDeviceMetricsOverride", size).await?;
        let scheme = if view.dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call(page, "Emulation.setEmulatedMedia", media).await?;
        self.events.clear();
        let navigated = self.call(page, "Page.navigate", json!({"url": url})).await?;
        if let Some(error) = navigated.get("errorText") {
            bail!("{url}: {error}");
        }
        let (mut console, mut requests) = (Vec::new(), Vec::new());
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.receive().await?,
            };
            if note(&event, &mut console, &mut requests) {
                break;
            }
        }
        let mut evaluate = async |expression: &str| -> Result<Value> {
            let result = self.call(page, "Runtime.evaluate", json!({"expression": expression})).await?;
            Ok(result.pointer("/result/value").cloned().unwrap_or_default())
        };
        let title = string_at(&evaluate("document.title").await?, "");
        let text = string_at(&evaluate("document.body.innerText").await?, "");
        let background = string_at(&evaluate("getComputedStyle(document.body).backgroundColor").await?, "");
        let content_width = evaluate("document.documentElement.scrollWidth").await?.as_u64().unwrap_or(u64::MAX);
        let picture = self.call(page, "Page.captureScreenshot", json!({"format": "png"})).await?;
        self.call(None, "Target.closeTarget", json!({"targetId": target})).await?;
        for event in self.events.drain(..) {
            note(&event, &mut console, &mut requests);
        }
        let picture = STANDARD.decode(string_at(&picture, "/data")).context("decoding the picture")?;
        Ok(Visit { title, text, content_width, background, console, requests, picture })
    }

    /// Sends a command and returns its result. Events that arrive meanwhile are kept.
    async fn call(&mut self, session: Option<&str>, method: &str, parameters: Value) -> Result<Value> {
        self.calls += 1;
        let id = self.calls;
        let mut command = json!({"id": id, "method": method, "params": parameters});
        if let (Some(session), Some(fields)) = (session, command.as_object_mut()) {
            fields.insert("sessionId".to_owned(), session.into());
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        timeout(TIMEOUT, self.commands.write_all(&bytes)).await.context("Chromium does not read")??;
        loop {
            let mut message =
                timeout(TIMEOUT, self.receive()).await.with_context(|| format!("no answer to {method}"))??;
            if message.get("id").and_then(Value::as_u64) == Some(id) {
                if let Some(error) = message.get("error") {
                    bail!("{method}: {error}");
                }
                return Ok(message.get_mut("result").map(Value::take).unwrap_or_default());
            }
            self.events.push_back(message);
        }
    }

    /// The next message. Messages are separated by a null byte.
    async fn receive(&mut self) -> Result<Value> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == 0) {
                let message: Vec<u8> = self.unread.drain(..=end).collect();
                return serde_json::from_slice(message.get(..end).unwrap_or_default()).context("reading a message");
            }
            let mut chunk = [0; 64 * 1024];
            let length = self.messages.read(&mut chunk).await.context("reading from Chromium")?;
            self.unread.extend(chunk.get(..length).unwrap_or_default());
        }
    }
}

/// The string at this JSON pointer, or an empty one.
fn string_at(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Keeps what an event says. Returns whether the page is loaded.
fn note(event: &Value, console: &mut Vec<String>, requests: &mut Vec<String>) -> bool {
    match event.get("method").and_then(Value::as_str).unwrap_or_default() {
        "Page.loadEventFired" => return true,
        "Network.requestWillBeSent" => requests.push(string_at(event, "/params/request/url")),
        "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded" | "Page.javascriptDialogOpening" => {
            console.push(event.to_string());
        }
        _ => {}
    }
    false
}
