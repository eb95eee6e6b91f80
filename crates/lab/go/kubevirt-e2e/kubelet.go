package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubelet/pkg/cri/streaming/portforward"

	"kubevirt.io/client-go/kubecli"
)

const (
	kubeletPort   = 10250
	clientTimeout = 30 * time.Second
)

// The lab's kubelet serves no API. The API server forwards ports through this one, which listens on the address of
// each node.
type kubelet struct {
	client kubecli.KubevirtClient
	// Where the simulated virt-handler answers.
	handler string
}

func serveKubelets(client kubecli.KubevirtClient) error {
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	encrypted := &tls.Config{Certificates: []tls.Certificate{certificate}}
	health, err := tls.Listen("tcp", "127.0.0.1:0", encrypted)
	if err != nil {
		return err
	}
	node := &kubelet{client: client, handler: health.Addr().String()}
	go http.Serve(health, http.HandlerFunc(node.handlerHealth))

	nodes, err := client.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, found := range nodes.Items {
		for _, address := range found.Status.Addresses {
			if address.Type != corev1.NodeInternalIP {
				continue
			}
			// HTTP/2 has no upgrade to another protocol.
			listener, err := tls.Listen("tcp", net.JoinHostPort(address.Address, strconv.Itoa(kubeletPort)), encrypted)
			if err != nil {
				return err
			}
			go http.Serve(listener, node)
		}
	}
	return nil
}

// ServeHTTP answers /portForward/{namespace}/{pod}.
func (k *kubelet) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	parts := strings.Split(strings.Trim(request.URL.Path, "/"), "/")
	if len(parts) < 3 || parts[0] != "portForward" {
		http.Error(response, "this kubelet only forwards ports", http.StatusNotImplemented)
		return
	}
	options, err := portforward.NewV4Options(request)
	if err != nil {
		http.Error(response, err.Error(), http.StatusBadRequest)
		return
	}
	pod := parts[1] + "/" + parts[2]
	portforward.ServePortForward(response, request, k, pod, types.UID(""), options, time.Hour, clientTimeout,
		portforward.SupportedProtocols)
}

// PortForward connects one stream with the port of a pod.
func (k *kubelet) PortForward(ctx context.Context, name string, _ types.UID, port int32, stream io.ReadWriteCloser) error {
	namespace, name, _ := strings.Cut(name, "/")
	pod, err := k.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	address := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(port)))
	if pod.Labels["kubevirt.io"] == "virt-handler" {
		address = k.handler
	}
	connection, err := (&net.Dialer{Timeout: clientTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer connection.Close()
	ended := make(chan error, 2)
	go func() {
		_, err := io.Copy(connection, stream)
		ended <- err
	}()
	go func() {
		_, err := io.Copy(stream, connection)
		ended <- err
	}()
	return <-ended
}

// The lab simulates virt-handler without a process. Its health endpoint says which version of the KubeVirt resource it
// has read.
func (k *kubelet) handlerHealth(response http.ResponseWriter, _ *http.Request) {
	found, err := k.client.KubeVirt(metav1.NamespaceAll).List(context.Background(), metav1.ListOptions{})
	if err != nil || len(found.Items) == 0 {
		http.Error(response, fmt.Sprint("no KubeVirt resource: ", err), http.StatusServiceUnavailable)
		return
	}
	json.NewEncoder(response).Encode(map[string]string{"config-resource-version": found.Items[0].ResourceVersion})
}

// The API server of the lab does not verify the certificates of kubelets.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
