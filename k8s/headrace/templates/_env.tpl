{{/* Variables of one component, before those that all have. Argument: list of the root context and the component. */}}

{{- define "headrace.coordinatorEnv" -}}
- {name: HEADRACE_STORE_PORT, value: {{ (index . 0).Values.coordinator.storePort | quote }}}
{{ include "headrace.env" . }}
{{- end -}}

{{- define "headrace.generatorEnv" -}}
- {name: HEADRACE_GENERATOR_ID, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{ include "headrace.env" . }}
{{- end -}}

{{- define "headrace.learnerEnv" -}}
{{- $root := index . 0 -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
# Where generators fetch the weights.
- {name: HEADRACE__WEIGHTS__HOST, value: $(POD_IP)}
- {name: HEADRACE__LEARNER__RANKS, value: {{ include "headrace.learnerRanks" $root | quote }}}
# torchrun's own variables. The store is the coordinator's, so no node is the one that must not die, and no
# agent shares it with its workers: a node that came back would crash all agents.
- {name: PET_NNODES, value: "{{ $root.Values.learner.minNodes }}:{{ $root.Values.learner.maxNodes }}"}
- {name: PET_NPROC_PER_NODE, value: {{ include "headrace.learnerRanks" $root | quote }}}
- {name: PET_RDZV_BACKEND, value: c10d}
- {name: PET_RDZV_ID, value: {{ include "headrace.runId" $root | quote }}}
- {name: PET_RDZV_ENDPOINT, value: "{{ include "headrace.fullname" $root }}-coordinator:{{ $root.Values.coordinator.storePort }}"}
- {name: PET_RDZV_CONF, value: "is_host=false,last_call_timeout=1,join_timeout=600,keep_alive_interval=1,keep_alive_max_attempt=5"}
- {name: PET_LOCAL_ADDR, value: $(POD_IP)}
- {name: PET_MAX_RESTARTS, value: "1000"}
- {name: PET_MONITOR_INTERVAL, value: "0.1"}
# The agent kills ranks that are still writing their checkpoint this long after SIGTERM; 30 s by default.
- {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: {{ max 1 (sub (int $root.Values.learner.terminationGracePeriodSeconds) 10) | quote }}}
- {name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}
{{ include "headrace.env" . }}
{{- end -}}
