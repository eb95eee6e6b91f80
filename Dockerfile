# The image of both operators, for those who build with a container engine. `cargo xtask image` builds the same without one.
# Both architectures: docker buildx build --platform linux/amd64,linux/arm64 .
ARG RUST_VERSION=1.95.0
# The compiler runs on the builder's own architecture, because emulation is many times slower.
FROM --platform=$BUILDPLATFORM docker.io/library/rust:${RUST_VERSION}-bookworm AS build
WORKDIR /vitivirt
# The commit that the programs report: docker build --build-arg VITIVIRT_COMMIT=$(git rev-parse --short=8 HEAD) .
ARG VITIVIRT_COMMIT=unknown
# The builder sets it. A default here would take precedence over the builder's value.
ARG TARGETARCH
COPY . .
# musl comes with the Rust target. Only ring has C code, which needs only the headers of a C library.
RUN set -eux; \
    own="$(dpkg --print-architecture)"; \
    target="${TARGETARCH:-$own}"; \
    case "$target" in \
        amd64) arch=x86_64; packages="gcc-x86-64-linux-gnu libc6-dev-amd64-cross" ;; \
        arm64) arch=aarch64; packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;; \
        *) echo "unsupported value \"$target\" of TARGETARCH; supported values: amd64, arm64" >&2; exit 1 ;; \
    esac; \
    compiler=cc; \
    flags="-Ctarget-feature=+crt-static --remap-path-prefix=$CARGO_HOME=/cargo"; \
    if [ "$target" != "$own" ]; then \
        apt-get update; \
        apt-get install --yes --no-install-recommends $packages; \
        compiler="$arch-linux-gnu-gcc"; \
        flags="$flags -Clinker=rust-lld"; \
    fi; \
    rustup target add "$arch-unknown-linux-musl"; \
    export "CC_${arch}_unknown_linux_musl=$compiler" "CFLAGS_${arch}_unknown_linux_musl=-U_FORTIFY_SOURCE"; \
    RUSTFLAGS="$flags" cargo build --locked --release --target "$arch-unknown-linux-musl" \
        --package kubevirt-operator --package virt-operator; \
    mkdir /release; \
    cp target/"$arch"-unknown-linux-musl/release/kubevirt-operator target/"$arch"-unknown-linux-musl/release/virt-operator /release/

FROM scratch
COPY --from=build /release/kubevirt-operator /release/virt-operator /usr/local/bin/
COPY LICENSE /licenses/LICENSE
ENV PATH=/usr/local/bin
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/usr/local/bin/kubevirt-operator"]
