#!/usr/bin/env bash
# Builds the servers of Kubernetes 1.20 from Debian's source package, once: about ten minutes of two cores.
# Needs root, Debian 12 and its package sources; what is built stays under $SERVICES.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
scripts=$root/../shared/services
export SERVICES=${SERVICES:-$HOME/.cache/sparsebp-services}
if [ ! -d "$scripts" ]; then
  echo "the scripts that start real engines are not here: $scripts" >&2
  exit 1
fi
[ ! -x "$SERVICES/k8s/bin/kubelet" ] || exit 0
sources=/etc/apt/sources.list.d/debian.sources
[ ! -e $sources ] || sed 's/^Types: deb$/Types: deb-src/' $sources > /etc/apt/sources.list.d/debian-src.sources
apt-get update -qq
client=$(command -v kubectl > /dev/null || echo kubernetes-client)
# shellcheck disable=SC2086 - empty where kubectl is there
apt-get install -y -qq --no-install-recommends golang-go etcd-server golang-github-modern-go-reflect2-dev jq rsync make \
  dpkg-dev docker.io busybox-static $client
mkdir -p "$SERVICES/k8s/bin"
cd "$SERVICES/k8s"
apt-get source --download-only kubernetes
tar xzf kubernetes_*.orig.tar.gz
cd kubernetes-1.20.2
reflect=vendor/github.com/modern-go/reflect2  # this version crashes with Debian's Go
find $reflect -type f ! -name BUILD -delete
cp /usr/share/gocode/src/github.com/modern-go/reflect2/* $reflect/
bash "$scripts/k8s_build.sh"
cp _output/local/bin/linux/amd64/kube{-apiserver,-controller-manager,-scheduler,let} "$SERVICES/k8s/bin/"
