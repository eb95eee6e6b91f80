//! One of our operators as a process. It uses its own service account, never the lab's administrator.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tokio::{
    net::TcpStream,
    process::{Child, Command},
};

use crate::{addresses::loopback, credentials::Credentials, http_get, kubelet::probe};

/// The port of status pages.
const STATUS_PORT: u16 = 8082;

#[derive(Clone, Debug)]
pub struct OperatorProcessOptions {
    pub file: PathBuf,
    pub namespace: String,
    pub service_account: String,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    /// Whether its requests go through the fault proxy.
    pub through_proxy: bool,
}

pub struct OperatorProcess {
    child: Child,
    pid: i32,
    address: IpAddr,
    log: PathBuf,
}

impl OperatorProcess {
    /// Replaces `{address}` in arguments and variables with the address of the process, and `{loopback}` with its loopback
    /// address.
    pub(crate) fn start(
        options: &OperatorProcessOptions,
        credentials: &Credentials,
        address: IpAddr,
        folder: &Path,
        number: u8,
    ) -> Result<Self> {
        let kubeconfig = folder.join(format!("program-{number}.kubeconfig"));
        credentials.write(&kubeconfig)?;
        let name = options.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let log = folder.join("logs").join(format!("program-{number}-{name}.log"));
        let sink = std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let fill = |text: &String| {
            text.replace("{address}", &address.to_string()).replace("{loopback}", &loopback(address).to_string())
        };
        let child = Command::new(&options.file)
            .args(options.arguments.iter().map(fill))
            .env_clear()
            .env("KUBECONFIG", &kubeconfig)
            .envs(options.environment.iter().map(|(name, value)| (name.clone(), fill(value))))
            .stdin(Stdio::null())
            .stdout(sink.try_clone().context("sharing the log file")?)
            .stderr(sink)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", options.file.display()))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).context("the program exited immediately")?;
        Ok(OperatorProcess { child, pid, address, log })
    }

    /// The address on which it listens, if its arguments name it.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid), signal).context("sending a signal to the program")
    }

    /// Waits for the exit of the program. Returns an error at the timeout.
    pub async fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        match tokio::time::timeout(timeout, self.child.wait()).await {
            Ok(status) => status.context("waiting for the program"),
            Err(_) => bail!("the program did not exit within {timeout:?}; its log:\n{}", self.log_text()),
        }
    }

    /// Requests a path over plain HTTP. Returns status and body.
    pub async fn get(&self, port: u16, path: &str) -> Result<(u16, String)> {
        let response = http_get::get(self.connect(port).await?, self.address, path).await?;
        Ok((response.status(), response.text().await?))
    }

    /// Requests a path of its status page. Returns status and body.
    pub async fn get_status_page(&self, path: &str) -> Result<(u16, String)> {
        get_status_page(self.address, path).await
    }

    /// Requests a path over TLS without checking the certificate, as the kubelet does.
    pub async fn get_over_tls(&self, port: u16, path: &str) -> Result<(u16, String)> {
        self.get_over_tls_with_token(port, path, None).await
    }

    /// Like `get_over_tls`, with a bearer token.
    pub async fn get_over_tls_with_token(&self, port: u16, path: &str, token: Option<&str>) -> Result<(u16, String)> {
        let response = probe::get_over_tls(self.connect(port).await?, self.address, path, token).await?;
        Ok((response.status(), response.text().await?))
    }

    async fn connect(&self, port: u16) -> Result<TcpStream> {
        TcpStream::connect((self.address, port)).await.with_context(|| format!("connecting to port {port}"))
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The log as JSON objects, without an incomplete last line.
    pub fn log_lines(&self) -> Vec<Value> {
        self.log_text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits until a log line has this message, and returns it.
    pub async fn wait_for_message(&self, message: &str, timeout: Duration) -> Result<Value> {
        let search = async {
            loop {
                let lines = self.log_lines();
                if let Some(line) =
                    lines.into_iter().find(|line| line.get("message").and_then(Value::as_str) == Some(message))
                {
                    return line;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(timeout, search).await {
            Ok(line) => Ok(line),
            Err(_) => bail!("the program did not log {message:?} within {timeout:?}; its log:\n{}", self.log_text()),
        }
    }
}

/// Requests a path of the status page of a process or pod with this address. Returns status and body.
pub async fn get_status_page(address: IpAddr, path: &str) -> Result<(u16, String)> {
    let address = loopback(address);
    let stream = TcpStream::connect((address, STATUS_PORT)).await.context("connecting to the status page")?;
    let response = http_get::get(stream, address, path).await?;
    Ok((response.status(), response.text().await?))
}
