//! `plan --k8s`: a plan as a Kubernetes manifest. The container's memory limit comes from the plan, so the server in it needs no
//! budget: it reads its cgroup and plans the same again. This file must compute no sizes but that limit.

use std::fmt;
use std::path::Path;

use plimsoll_engine::EnginePlan;

use crate::args::{K8sArgs, PlanArgs};
use crate::names::{default_name, last_name};

/// Seconds between the decision to end a pod and SIGTERM. Meanwhile proxies stop sending requests to the pod.
const LEAVE_SECONDS: u64 = 5;

/// Seconds beyond leaving and draining after which the kubelet kills.
const SPARE_SECONDS: u64 = 10;

/// Probes of ten seconds each in which a pod must have fetched, loaded and tested its model: half an hour.
const STARTUP_PROBES: u64 = 180;

/// Longest name of an object that labels may carry, too.
const NAME_BYTES_MAX: usize = 63;

/// A plan as a Kubernetes manifest. [`fmt::Display`] writes the YAML.
pub struct Manifest<'a> {
    /// The flags of `plan`.
    pub args: &'a PlanArgs,
    /// The model's files on this machine.
    pub path: &'a Path,
    /// The plan.
    pub planned: &'a EnginePlan,
    /// Compute threads of the plan, which are the container's CPUs.
    pub threads: usize,
}

impl Manifest<'_> {
    /// Whole MiB that hold the plan and 3 % for the kernel's own accounting of it, as `deploy/memory-max.sh` gives a unit.
    fn limit_mib(&self) -> u64 {
        let total = self.planned.plan.total();
        (total + total * 3 / 100).div_ceil(1 << 20)
    }

    /// Whether the model is a path on this machine. The pod then finds it in a volume.
    fn is_local(&self) -> bool {
        Path::new(&self.args.model).exists()
    }

    /// The container's arguments. They fix the plan's sizes, so that any node comes to the same plan, or without a matrix unit to a
    /// smaller one.
    fn serve_args(&self) -> Vec<String> {
        let model = match (self.is_local(), last_name(self.path)) {
            (true, Some(name)) => format!("/models/{}", name.to_string_lossy()),
            // The root is the volume itself.
            (true, None) => "/models".to_owned(),
            (false, _) => self.args.model.clone(),
        };
        let mut all = vec!["serve".to_owned(), model, format!("--threads={}", self.threads)];
        if !self.planned.limits.encoder {
            all.push(format!("--max-total-token-num={}", self.planned.limits.max_total_token_num));
        }
        all.extend(self.args.k8s.serve_flags.iter().map(|flag| flag.to_string_lossy().into_owned()));
        all
    }

    /// The objects' name: `plimsoll-` and the model's name, with the characters and the length that a label allows.
    fn name(&self) -> String {
        let model = default_name(&self.args.model).to_ascii_lowercase();
        let letters = model.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' });
        let name: String = "plimsoll-".chars().chain(letters).take(NAME_BYTES_MAX).collect();
        name.trim_end_matches('-').to_owned()
    }
}

/// A string that YAML reads as it is: JSON's are YAML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Manifest<'_> {
    /// The Deployment up to its container.
    fn write_deployment(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, name) = (self.planned.plan.total(), self.name());
        let K8sArgs { drain_seconds, replicas, .. } = &self.args.k8s;
        let grace = LEAVE_SECONDS + drain_seconds + SPARE_SECONDS;
        writeln!(
            f,
            r#"# The plan takes {total} bytes. Memory is that and 3 % for the kernel's own accounting, rounded up to whole MiB; request = limit,
# so that nobody else is promised a byte of it. The server reads this limit and needs no --memory-budget. A change of model, flags or
# threads changes the plan: print this anew.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels: &labels
    app.kubernetes.io/name: plimsoll
    app.kubernetes.io/instance: {name}
spec:
  replicas: {replicas}
  selector:
    matchLabels: *labels
  template:
    metadata:
      labels: *labels
    spec:
      # preStop, then --drain-seconds, then {SPARE_SECONDS} to end.
      terminationGracePeriodSeconds: {grace}
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile:
          type: RuntimeDefault"#
        )
    }

    /// The container: its image, arguments, variables and limits.
    fn write_container(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (threads, memory) = (self.threads, self.limit_mib());
        let image = quoted(&self.args.k8s.container_image);
        let args: String = self.serve_args().iter().map(|arg| format!("\n            - {}", quoted(arg))).collect();
        writeln!(
            f,
            r#"      containers:
        - name: plimsoll
          image: {image}
          args:{args}
          env:
            - name: PLIMSOLL_HOST
              value: "0.0.0.0"
            - name: PLIMSOLL_PORT
              value: "8000"
            - name: PLIMSOLL_LOG_FORMAT
              value: json
            - name: PLIMSOLL_CACHE
              value: /cache
            # kubectl create secret generic plimsoll --from-literal=api-keys=KEY,KEY
            - name: PLIMSOLL_API_KEY
              valueFrom:
                secretKeyRef:
                  name: plimsoll
                  key: api-keys
                  optional: true
          ports:
            - name: http
              containerPort: 8000
          resources:
            requests:
              cpu: {threads}
              memory: {memory}Mi
            limits:
              cpu: {threads}
              memory: {memory}Mi"#
        )
    }

    /// The container's probes.
    fn write_probes(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            r#"          # Nothing listens before the self-test has passed; fetching a model is part of that.
          startupProbe:
            httpGet:
              path: /ready
              port: http
            periodSeconds: 10
            failureThreshold: {STARTUP_PROBES}
          # 503 while a pod drains: it gets nothing new.
          readinessProbe:
            httpGet:
              path: /ready
              port: http
            periodSeconds: 5
            timeoutSeconds: 2
            failureThreshold: 2
          # 503 when the engine has made no progress for --stall-seconds; a full server is healthy.
          livenessProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3"#
        )
    }

    /// The rest of the container, and the volumes it mounts.
    fn write_volumes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mount, volume) = match self.is_local() {
            true => (
                "\n            - name: models\n              mountPath: /models\n              readOnly: true",
                "\n        # Holds what is a path where this was planned.\n        - name: models\n          \
                 persistentVolumeClaim:\n            claimName: plimsoll-models\n            readOnly: true",
            ),
            false => ("", ""),
        };
        writeln!(
            f,
            r#"          lifecycle:
            preStop:
              exec:
                command: ["sleep", "{LEAVE_SECONDS}"]
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: ["ALL"]
          volumeMounts:
            - name: cache
              mountPath: /cache
            - name: tmp
              mountPath: /tmp{mount}
      volumes:
        # Each pod fetches its model; a PersistentVolumeClaim here keeps it.
        - name: cache
          emptyDir: {{}}
        - name: tmp
          emptyDir: {{}}{volume}"#
        )
    }

    /// The Service.
    fn write_service(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        write!(
            f,
            r#"---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: plimsoll
    app.kubernetes.io/instance: {name}
spec:
  selector:
    app.kubernetes.io/name: plimsoll
    app.kubernetes.io/instance: {name}
  ports:
    - name: http
      port: 8000
      targetPort: http"#
        )
    }
}

impl fmt::Display for Manifest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_deployment(f)?;
        self.write_container(f)?;
        Self::write_probes(f)?;
        self.write_volumes(f)?;
        self.write_service(f)
    }
}
