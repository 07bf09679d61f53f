// Softmax attention over pairs of keys (j1, j2), the largest logit and the sum of each row kept as it goes. A threadgroup has one head,
// ROWS queries, 8 to a simdgroup, and a tile of second keys and values, past which all first keys go before the next is loaded; of each
// 8 x 8 block of a matrix a lane has two neighbours of one row. With each first key and tile it is softmax attention of other queries:
//
//   S = scale (q * k1_j1) k2^T log2(e)           (8, KEYS)    then the mask
//   top' = max(top, max S),  W = 2^(S - top')    (8, KEYS)
//   part = part 2^(top - top') + sum W           (8,)
//   U = U 2^(top - top') + (W v2) * v1_j1        (8, E)       a sum of its own for each tile
//   acc += U, total += part                      after 64 of them, so that no chain of additions is long; and at the end
//
// q (bq, n, D), k1 (bk1, m1, D), k2 (bk2, m2, D), v1 (bv1, m1, E), v2 (bv2, m2, E), mask (b, n or 1, m1 or 1, m2 or 1);
// of (6, heads): which of the b a head uses. out (heads, n, E), lse (heads, n).
// sizes: n, m1, m2, low and high of first keys, of second keys, mask rows, mask first keys, mask second keys.  factors: scale log2(e).

constexpr int K_PITCH = D + 16 / int(sizeof(T)), V_PITCH = E + 16 / int(sizeof(T));      // rows of a tile begin in different banks
threadgroup T k_tile[KEYS * K_PITCH], v_tile[KEYS * V_PITCH];
threadgroup bool broken[SIMDS];

const int n = sizes[0], m1 = sizes[1], m2 = sizes[2], low1 = sizes[3], high1 = sizes[4], low2 = sizes[5], high2 = sizes[6];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
const int row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int i0 = threadgroup_position_in_grid.x * ROWS, i8 = i0 + 8 * simd, i = i8 + row, at_most = min(i, n - 1);
const auto queries = q + (size_t(of[head]) * n + at_most) * D;                    // auto: MLX has small arrays in constant memory
const auto first_keys = k1 + size_t(of[heads + head]) * m1 * D;
const auto keys = k2 + size_t(of[2 * heads + head]) * m2 * D;
const auto first_values = v1 + size_t(of[3 * heads + head]) * m1 * E;
const auto values = v2 + size_t(of[4 * heads + head]) * m2 * E;
const auto masks = mask + (size_t(of[5 * heads + head]) * sizes[7] + (sizes[7] > 1 ? at_most : 0)) * sizes[8] * sizes[9];

simdgroup_matrix<float, 8, 8> Q[D / 8], S[KEYS / 8], U[E / 8], acc[E / 8];
for (int c = 0; c < D / 8; c++) {
  Q[c].thread_elements()[0] = float(queries[8 * c + col]);
  Q[c].thread_elements()[1] = float(queries[8 * c + col + 1]);
}
for (int c = 0; c < E / 8; c++) {
  U[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  acc[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float top = -INFINITY, part = 0.0f, acc_top = -INFINITY, total = 0.0f;
int added = 0;

const int first = max(0, i8 + low1), first_end = min(m1, min(i8 + 8, n) + high1), j_end = min(m2, min(i0 + ROWS, n) + high2);
for (int j0 = max(0, i0 + low2) / KEYS * KEYS; j0 < j_end; j0 += KEYS) {
  bool unclean = false;
  for (int t = simd * 32 + lane; t < KEYS * D; t += 32 * SIMDS) {
    k_tile[t / D * K_PITCH + t % D] = j0 + t / D < m2 ? keys[size_t(j0) * D + t] : T(0);
  }
  for (int t = simd * 32 + lane; t < KEYS * E; t += 32 * SIMDS) {
    const T x = j0 + t / E < m2 ? values[size_t(j0) * E + t] : T(0);
    unclean = unclean || !isfinite(float(x));
    v_tile[t / E * V_PITCH + t % E] = x;
  }
  unclean = simd_any(unclean);
  if (lane == 0) {
    broken[simd] = unclean;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool finite = true;
  for (int s = 0; s < SIMDS; s++) {
    finite = finite && !broken[s];
  }

  for (int j1 = first; j1 < first_end; j1++) {       // each simdgroup by itself
    const auto key = first_keys + size_t(j1) * D;
    const auto value = first_values + size_t(j1) * E;
    for (int b = 0; b < KEYS / 8; b++) {
      S[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int c = 0; c < D / 8; c++) {
      simdgroup_matrix<float, 8, 8> F, K;
      F.thread_elements()[0] = Q[c].thread_elements()[0] * float(key[8 * c + col]);
      F.thread_elements()[1] = Q[c].thread_elements()[1] * float(key[8 * c + col + 1]);
      for (int b = 0; b < KEYS / 8; b++) {
        K.thread_elements()[0] = float(k_tile[(8 * b + col) * K_PITCH + 8 * c + row]);
        K.thread_elements()[1] = float(k_tile[(8 * b + col + 1) * K_PITCH + 8 * c + row]);
        simdgroup_multiply_accumulate(S[b], F, K, S[b]);
      }
    }

    uint seen = 0;                                   // a bit for each of the lane's logits
    float largest = top, sum = 0.0f;
    const bool sees_first = j1 >= i + low1 && j1 <= i + high1;
    const auto mask_row = masks + (sizes[8] > 1 ? size_t(j1) * sizes[9] : 0);
    for (int b = 0; b < KEYS / 8; b++) {
      for (int e = 0; e < 2; e++) {
        const int j = j0 + 8 * b + col + e, at = sizes[9] > 1 ? min(j, m2 - 1) : 0;
        const bool sees = sees_first && j < m2 && j >= i + low2 && j <= i + high2 && (!MASKED || mask_row[at]);
        seen |= uint(sees) << (2 * b + e);
        const float s = sees ? S[b].thread_elements()[e] * factors[0] : -INFINITY;
        S[b].thread_elements()[e] = s;
        largest = max(largest, s);
      }
    }
    largest = max(largest, simd_shuffle_xor(largest, 1));
    largest = max(largest, simd_shuffle_xor(largest, 8));
    const float shift = largest == -INFINITY ? 0.0f : largest, fade = exp2(top - shift);
    for (int b = 0; b < KEYS / 8; b++) {
      for (int e = 0; e < 2; e++) {
        const float w = exp2(S[b].thread_elements()[e] - shift);
        S[b].thread_elements()[e] = w;
        sum += w;
      }
    }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 8);
    top = largest;
    part = part * fade + sum;

    bool clean = finite;
    for (int c = 0; c < E / 8; c++) {
      clean = clean && isfinite(float(value[8 * c + col])) && isfinite(float(value[8 * c + col + 1]));
    }
    clean = simd_all(clean);
    for (int c = 0; c < E / 8; c++) {
      simdgroup_matrix<float, 8, 8> R = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      const float factor[2] = {float(value[8 * c + col]), float(value[8 * c + col + 1])};
      if (clean) {
        for (int b = 0; b < KEYS / 8; b++) {
          simdgroup_matrix<float, 8, 8> V;
          V.thread_elements()[0] = float(v_tile[(8 * b + row) * V_PITCH + 8 * c + col]);
          V.thread_elements()[1] = float(v_tile[(8 * b + row) * V_PITCH + 8 * c + col + 1]);
          simdgroup_multiply_accumulate(R, S[b], V, R);
        }
      } else {                                       // 0 * NaN is NaN: what a query does not see is left out
        for (int b = 0; b < KEYS / 8; b++) {
          for (int at = 0; at < 8; at++) {
            const int other = (lane & ~9) | (at / 2 & 1) | (at / 4) << 3;
            const float w = simd_shuffle(S[b].thread_elements()[at % 2], other);
            const bool sees = simd_shuffle(seen, other) >> (2 * b + at % 2) & 1;
            for (int e = 0; e < 2; e++) {
              R.thread_elements()[e] += sees ? w * (factor[e] * float(v_tile[(8 * b + at) * V_PITCH + 8 * c + col + e])) : 0.0f;
            }
          }
        }
      }
      for (int e = 0; e < 2; e++) {
        U[c].thread_elements()[e] = U[c].thread_elements()[e] * fade + R.thread_elements()[e] * (clean ? factor[e] : 1.0f);
      }
    }

    if (++added == 64 || (j1 + 1 == first_end && j0 + KEYS >= j_end)) {
      const float older = exp2(acc_top - shift);
      for (int c = 0; c < E / 8; c++) {
        for (int e = 0; e < 2; e++) {
          acc[c].thread_elements()[e] = acc[c].thread_elements()[e] * older + U[c].thread_elements()[e];
          U[c].thread_elements()[e] = 0.0f;
        }
      }
      total = total * older + part;
      part = 0.0f;
      acc_top = top;
      added = 0;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const bool empty = total == 0.0f;
if (i < n) {
  for (int c = 0; c < E / 8; c++) {
    for (int e = 0; e < 2; e++) {
      out[(size_t(head) * n + i) * E + 8 * c + col + e] = T(empty ? 0.0f : acc[c].thread_elements()[e] / total);
    }
  }
  if (col == 0) {
    lse[size_t(head) * n + i] = empty ? -INFINITY : (top + log2(total)) * M_LN2_F;
  }
}
