// Softmax attention of few queries, as in decoding. A threadgroup has one query of one head; each of its simdgroups takes every SIMDS-th
// key, and a lane every 32nd feature. What they found is put together at the end.
//
//   s = scale <q, k_j> log2(e)       then softcap, bias;  top' = max(top, s),  w = 2^(s - top')      SIGNED: 2^(|s| - top') sign(s)
//   total = total 2^(top - top') + |w|,   acc = acc 2^(top - top') + w v_j                           a sum of its own for 64 keys
//
// Arrays, sizes and factors are those of tiles.metal.

constexpr int OWN_D = (D + 31) / 32, OWN_E = (E + 31) / 32;
threadgroup float outs[SIMDS * E], tops[SIMDS], totals[SIMDS];
threadgroup bool mets[SIMDS];

const int n = sizes[0], m = sizes[1], low = sizes[2], high = sizes[3];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int i = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
const int heads = threadgroups_per_grid.y;
const auto query = q + (size_t(of[head]) * n + i) * D;
const auto keys = k + size_t(of[heads + head]) * m * D;
const auto values = v + size_t(of[2 * heads + head]) * m * E;
const auto biases = bias + size_t(of[3 * heads + head]) * sizes[4] * sizes[5] + (sizes[4] > 1 ? size_t(i) * sizes[5] : 0);
const auto masks = mask + size_t(of[4 * heads + head]) * sizes[6] * sizes[7] + (sizes[6] > 1 ? size_t(i) * sizes[7] : 0);

float own[OWN_D], acc[OWN_E], part[OWN_E];
for (int c = 0; c < OWN_D; c++) {
  own[c] = 32 * c + lane < D ? float(query[32 * c + lane]) : 0.0f;
}
for (int c = 0; c < OWN_E; c++) {
  acc[c] = part[c] = 0.0f;
}
float top = -INFINITY, total = 0.0f, part_total = 0.0f;
bool met = false;
int terms = 0;

for (int j = max(0, i + low) + simd; j < min(m, i + high + 1); j += SIMDS) {
  if (MASKED && !masks[sizes[7] > 1 ? j : 0]) {            // all lanes together
    continue;
  }
  met = true;
  float s = 0.0f;
  for (int c = 0; c < OWN_D; c++) {
    s += 32 * c + lane < D ? own[c] * float(keys[size_t(j) * D + 32 * c + lane]) : 0.0f;
  }
  s = simd_sum(s) * factors[0];
  s = CAPPED ? factors[1] * tanh(s / factors[1]) : s;
  s = BIASED ? s + biases[sizes[5] > 1 ? j : 0] * M_LOG2E_F : s;
  const float size = SIGNED ? abs(s) : s;
  const float largest = max(top, size), shift = largest == -INFINITY ? 0.0f : largest;
  const float fade = exp2(top - shift), weight = exp2(size - shift);
  const float w = SIGNED ? weight * (s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s) : weight;
  top = largest;
  total *= fade;
  part_total = part_total * fade + (SIGNED == 2 && s == 0.0f ? 0.0f : weight);
  for (int c = 0; c < OWN_E; c++) {
    const float x = 32 * c + lane < E ? float(values[size_t(j) * E + 32 * c + lane]) : 0.0f;
    acc[c] *= fade;
    part[c] = part[c] * fade + w * x;
  }
  if (++terms == 64) {
    terms = 0;
    total += part_total;
    part_total = 0.0f;
    for (int c = 0; c < OWN_E; c++) {
      acc[c] += part[c];
      part[c] = 0.0f;
    }
  }
}

for (int c = 0; c < OWN_E; c++) {
  if (32 * c + lane < E) {
    outs[simd * E + 32 * c + lane] = acc[c] + part[c];
  }
}
if (lane == 0) {
  tops[simd] = top;
  totals[simd] = total + part_total;
  mets[simd] = met;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const float z = SUNK ? sink[of[5 * heads + head]] * M_LOG2E_F : -INFINITY;
top = z;
met = false;
for (int s = 0; s < SIMDS; s++) {
  top = max(top, tops[s]);
  met = met || mets[s];
}
const float shift = top == -INFINITY ? 0.0f : top;
total = SUNK ? exp2(z - shift) : 0.0f;
for (int s = 0; s < SIMDS; s++) {
  total += totals[s] * exp2(tops[s] - shift);
}
total += SIGNED == 2 ? 1e-6f : 0.0f;
const bool empty = total == 0.0f || (total != total && !met);     // a NaN of the sink alone does not count where nothing is seen
for (int c = simd * 32 + lane; c < E; c += 32 * SIMDS) {
  float sum = 0.0f;
  for (int s = 0; s < SIMDS; s++) {
    sum += totals[s] == 0.0f && tops[s] == -INFINITY ? 0.0f : outs[s * E + c] * exp2(tops[s] - shift);
  }
  out[(size_t(head) * n + i) * E + c] = T(empty ? 0.0f : sum / total);
}
if (simd == 0 && lane == 0) {
  lse[size_t(head) * n + i] = total == 0.0f ? -INFINITY : (top + log2(total)) * M_LN2_F;
}
